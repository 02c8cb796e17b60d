"""Signs of life of every rank in the run folder, so that a rank that hangs can be named.

A thread of each rank writes `state/ranks/N` every few seconds, also while the rank waits for
others: how far its main thread is, where it is and for how long it has been there. And it looks at
the file of the next rank. A process that is stopped, or a machine that is gone, falls silent; a
process whose main thread waits for a disk or a lock says so itself. Whoever waits for such a rank
in a collective could not say for whom. Ages are differences between times of files of one file
system, so clocks of machines need not agree. Of the ranks of its own machine each one also sees
whether their processes run: GPUs wait for a rank that is gone until a timeout. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dms_train.observe import processes
from dms_train.observe.log import logger
from dms_train.observe.main_thread import Kind, MainThread

_EVERY_SECONDS = 10.0
_SAID = "said"  # the file by which all ranks learn that one of them has found a reason to end
# Times the patience, which is half of what a collective has.
_LATE = 1.5
# After a pause of everybody (a file system that fails over, a job that is suspended) all files are
# old; a rank that lives has written again by the third look.
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself.

    Attributes:
        host: Its machine.
        step: The last step that it took.
        kind: What its main thread does (`main_thread`).
        place: Where.
        seconds: For how long it has been there.
        process: Its process (`processes.mark`).
    """

    host: str
    step: int
    kind: Kind
    place: str
    seconds: float
    process: str = ""

    def __str__(self) -> str:
        return f"{self.host}, after step {self.step}"


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
        patience: Seconds after which a rank without a sign of life counts as hanging, and one whose
            main thread stands still.
        hang: Called once, in a thread of its own, with what is known of the ranks that do, or None
            when another rank has said it; a main thread that waits for its GPU hears no signal.
        main: Looks at the main thread.
    """

    folder: Path
    rank: int
    ranks: int
    patience: float
    hang: Callable[[str | None], None]
    main: MainThread = field(default_factory=MainThread)
    _step: int = field(default=0, init=False)
    _moves: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _own: Report | None = field(default=None, init=False)
    _mentioned: bool = field(default=False, init=False)
    _process: str = field(default_factory=processes.mark, init=False)
    _gone: frozenset[int] = field(default=frozenset(), init=False)
    _ends: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """From here on this rank is watched."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = self._beat()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """A step was taken; shown when this rank falls silent."""
        self._step = step

    def moved(self) -> None:
        """The main thread got somewhere, such as to the next microbatch."""
        self._moves += 1

    def stop(self, *, in_order: bool = True) -> None:
        """This rank leaves; not in order, it leaves its file so that others see that it is gone."""
        if self._ends.is_set():
            return
        self._ends.set()
        if self._thread is not None:
            # before its file is removed; not for ever, as the file system may be what hangs
            self._thread.join(self._interval())
        if in_order:
            self._remove()

    def silent(self) -> list[Silent]:
        """The ranks that have given no sign of life for too long."""
        now = self._beat()
        found = (self._age(rank, now) for rank in range(self.ranks))
        return [silent for silent in found if silent is not None]

    def ended(self) -> str | None:
        """The ranks of this machine whose processes were gone at this look and the last one.

        Whoever leaves in order removes its file before its process ends.
        """
        found = {r: a for r, a in self._neighbours() if processes.has_ended(a.process)}
        before, self._gone = self._gone, frozenset(found)
        return ", ".join(f"rank {r} ({found[r]})" for r in sorted(before & self._gone)) or None

    def _neighbours(self) -> Iterator[tuple[int, Report]]:
        """Other ranks of this machine, which stand in a row."""
        for row in (range(self.rank + 1, self.ranks), range(self.rank - 1, -1, -1)):
            for rank in row:
                report = self._current(rank)
                if report is not None:
                    if report.host != socket.gethostname():
                        break
                    yield rank, report

    def stuck(self) -> str | None:
        """What is known of ranks that live but do not go on.

        The rank before a standing one asks all; one rank finds out that all wait for each other.
        """
        following = self._current((self.rank + 1) % self.ranks)
        if following is not None and self._overdue(following, "stands"):
            return self._standing()
        if self.rank == 0 and self._own is not None and self._overdue(self._own, "waits"):
            return self._all_waiting()
        return None

    def _mention(self, rank: int) -> None:
        """Say once, before a collective gives up, that a rank it may wait for still works.

        It may be right to: rank 0 validates while the others wait, however long that takes.
        """
        own, other = self._own, self._current(rank)
        if own is None or own.kind != "waits" or own.seconds <= _LATE * self.patience:
            self._mentioned = False
        elif not self._mentioned and other is not None and other.kind == "works":
            self._mentioned = True
            waits = f"rank {self.rank} has waited for {own.seconds:.0f} s, at {own.place}"
            works = f"rank {rank} ({other}) still works, at {other.place}"
            logger().warning("%s; %s", waits, works)

    def _standing(self) -> str | None:
        known = {rank: self._current(rank) for rank in range(self.ranks)}
        found = {r: a for r, a in known.items() if a is not None and self._overdue(a, "stands")}
        told = (
            f"rank {rank} ({a}) lives but has not gone on for {a.seconds:.0f} s, at {a.place}"
            for rank, a in found.items()
        )
        return "; ".join(told) or None

    def _all_waiting(self) -> str | None:
        places: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            report = self._current(rank)
            if report is None or not self._overdue(report, "waits"):
                return None
            places.setdefault(report.place, []).append(rank)
        where = "; ".join(f"{_spans(ranks)} at {place}" for place, ranks in places.items())
        return (
            f"after step {self._step} all ranks wait for each other, or for their GPUs, for more "
            f"than {self.patience:.0f} s: {where}"
        )

    def _overdue(self, report: Report, kind: Kind) -> bool:
        return report.kind == kind and report.seconds > self.patience

    def _watch(self) -> None:
        following, looks, every = (self.rank + 1) % self.ranks, 0, self._interval()
        while not self._ends.wait(every):
            # a file system that fails for a moment is no rank that hangs
            with contextlib.suppress(OSError):
                looks = looks + 1 if self._age(following, self._beat()) is not None else 0
                silent = self.silent() if looks >= _LOOKS else []
                who = ", ".join(map(str, silent))
                found = f"{who} did not answer" if silent else self.stuck()
                if (gone := self.ended()) is not None:
                    found = f"{gone} has ended"
                if self._said() or found is not None:
                    self._end(found)
                    return
                self._mention(following)

    def _said(self) -> bool:
        """Whether a rank of this run has said why the run ends."""
        try:
            return (self.folder / _SAID).stat().st_mtime >= self._began
        except FileNotFoundError:
            return False

    def _end(self, found: str | None) -> None:
        said = self._said()
        with contextlib.suppress(OSError):
            (self.folder / _SAID).touch()
        self._remove()  # else the next one to notice would blame this rank
        self.hang(None if said else found)

    def _interval(self) -> float:
        return min(_EVERY_SECONDS, self.patience / 6)

    def _file(self, rank: int) -> Path:
        return self.folder / str(rank)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file(self.rank).unlink(missing_ok=True)

    def _beat(self) -> float:
        """Write; the time that the file system gives it."""
        stand = self.main.look((self._step, self._moves), 2 * self._interval())
        self._own = Report(
            socket.gethostname(), self._step, stand.kind, stand.place, stand.seconds, self._process
        )
        with contextlib.suppress(OSError):  # on a full disk the time alone changes
            self._file(self.rank).write_text(json.dumps(asdict(self._own)))
        os.utime(self._file(self.rank))
        return self._file(self.rank).stat().st_mtime

    def _report(self, rank: int) -> Report | None:
        """What a rank last said; None when it left, or is just writing."""
        try:
            return Report(**json.loads(self._file(rank).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _current(self, rank: int) -> Report | None:
        """What a rank said since this one is watching; an earlier run may have left its file."""
        try:
            if self._file(rank).stat().st_mtime < self._began:
                return None
        except FileNotFoundError:
            return None
        return self._report(rank)

    def _age(self, rank: int, now: float) -> Silent | None:
        try:
            seconds = now - max(self._file(rank).stat().st_mtime, self._began)
        except FileNotFoundError:  # not there yet, or left in good order
            return None
        if seconds <= self.patience:
            return None
        return Silent(rank, seconds, str(self._report(rank) or "no step known"))


def _spans(ranks: Iterable[int]) -> str:
    """`ranks 0-2, 5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'' if words.isdigit() else 's'} {words}"
