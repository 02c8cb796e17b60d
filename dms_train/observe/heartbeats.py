"""Signs of life of every rank in the run folder, so that a rank that hangs can be named.

A thread of each rank writes `state/ranks/N` every few seconds, also while the rank waits for
others, and looks at the file of the next rank. A process that is stopped, or a machine that is
gone, falls silent; whoever waits for it in a collective could not say for whom. Ages are
differences between times of files of one file system, so clocks of machines need not agree.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_EVERY_SECONDS = 10.0
# After a pause of everybody (a file system that fails over, a job that is suspended) all files are
# old; a rank that lives has written again by the third look.
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank without a sign of life: for how many seconds, where, and after which step."""

    rank: int
    seconds: float
    last: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.last}, silent for {self.seconds:.0f} s)"


@dataclass(slots=True)
class Heartbeats:
    """Writes this rank's sign of life and watches the next rank's.

    Attributes:
        folder: Folder of one file for each rank, on a file system that all ranks share.
        rank: This one.
        ranks: How many there are.
        patience: Seconds after which a rank without a sign of life counts as hanging.
        hang: Called once, in a thread of its own, with the ranks that do.
    """

    folder: Path
    rank: int
    ranks: int
    patience: float
    hang: Callable[[list[Silent]], None]
    _step: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _ends: threading.Event = field(default_factory=threading.Event, init=False)

    def start(self) -> None:
        """From here on this rank is watched."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = self._beat()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def reached(self, step: int) -> None:
        """A step was taken; shown when this rank falls silent."""
        self._step = step

    def stop(self) -> None:
        """This rank leaves in good order."""
        self._ends.set()
        with contextlib.suppress(OSError):
            self._file(self.rank).unlink(missing_ok=True)

    def silent(self) -> list[Silent]:
        """The ranks that have given no sign of life for too long."""
        now = self._beat()
        found = (self._age(rank, now) for rank in range(self.ranks))
        return [silent for silent in found if silent is not None]

    def _watch(self) -> None:
        following, looks = (self.rank + 1) % self.ranks, 0
        while not self._ends.wait(min(_EVERY_SECONDS, self.patience / 6)):
            # a file system that fails for a moment is no rank that hangs
            with contextlib.suppress(OSError):
                looks = looks + 1 if self._age(following, self._beat()) is not None else 0
                if looks >= _LOOKS and (silent := self.silent()):
                    self.hang(silent)
                    return

    def _file(self, rank: int) -> Path:
        return self.folder / str(rank)

    def _beat(self) -> float:
        """Write; the time that the file system gives it."""
        with contextlib.suppress(OSError):  # on a full disk the time alone changes
            self._file(self.rank).write_text(f"{socket.gethostname()}, after step {self._step}")
        os.utime(self._file(self.rank))
        return self._file(self.rank).stat().st_mtime

    def _age(self, rank: int, now: float) -> Silent | None:
        try:
            seconds = now - max(self._file(rank).stat().st_mtime, self._began)
            if seconds <= self.patience:
                return None
            return Silent(rank, seconds, self._file(rank).read_text() or "no step known")
        except FileNotFoundError:  # not there yet, or left in good order
            return None
