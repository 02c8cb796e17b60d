"""Heartbeats of every rank in the run folder, so that a stalled rank can be named.

The main thread of a rank declares its phase: it reads `data`, or it computes a `step`. A step
includes waiting for other ranks. Both phases have a time limit; anything else (saving, exporting,
validating) has none. Every few seconds a thread of each rank writes to `state/ranks/N` the phase,
the position in the code, and the time without progress. It also checks the file of the next rank:

- no heartbeat: the process is stopped or its machine is gone;
- no progress while reading data: that rank is stalled;
- no progress on any rank during a step: the ranks wait for each other;
- on the same machine, a process that has ended.

A stalled rank writes the stacks of all its threads to `state/ranks/N.stack` (faulthandler). Ages
are differences between modification times on one file system, so that clocks of machines need not
agree. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from dms_train.observe import processes
from dms_train.observe.log import logger

Phase = Literal["data", "step", "other"]
_EVERY_SECONDS = 10.0
_REPORTED = "reported"  # the file that marks that a rank has reported a reason to end
# Multiples of the patience, which is half of the timeout of a collective.
_LATE = 1.5
# After a pause of all ranks (a file system that fails over, a suspended job) all files are old; a
# rank that runs has written again by the third check.
_CHECKS = 3


@dataclass(frozen=True, slots=True)
class Report:
    """The heartbeat of a rank.

    Attributes:
        host: Machine of the rank.
        step: Last step that the rank finished.
        phase: Phase of the main thread.
        place: Function that the main thread was in at the time of writing.
        seconds: Time without progress in this phase.
        process: Identity of the process (`processes.mark`).
    """

    host: str
    step: int
    phase: Phase
    place: str
    seconds: float
    process: str = ""

    def __str__(self) -> str:
        return f"{self.host}, after step {self.step}"


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank without a heartbeat: duration of the silence, machine and last step."""

    rank: int
    seconds: float
    last: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.last}, silent for {self.seconds:.0f} s)"


@dataclass(slots=True)
class Heartbeats:
    """Writer of this rank's heartbeat, and observer of the next rank's.

    Attributes:
        folder: Folder of one file for each rank, on a file system that all ranks share.
        rank: This rank.
        ranks: Number of ranks.
        patience: Seconds without a heartbeat, or without progress in a phase with a limit, after
            which a rank counts as stalled.
        hang: Called once, in a separate thread, because a main thread that waits for its GPU gets
            no signal. The argument describes the stalled ranks, or is None if another rank has
            reported them.
    """

    folder: Path
    rank: int
    ranks: int
    patience: float
    hang: Callable[[str | None], None]
    _step: int = field(default=0, init=False)
    _warm: bool = field(default=False, init=False)
    _phase: Phase = field(default="other", init=False)
    _progress: int = field(default=0, init=False)
    _last: tuple[float, int, float] = field(default=(0.0, -1, 0.0), init=False)
    _began: float = field(default=0.0, init=False)
    _own: Report | None = field(default=None, init=False)
    _late_checks: int = field(default=0, init=False)
    _mentioned: bool = field(default=False, init=False)
    _process: str = field(default_factory=processes.mark, init=False)
    _gone: frozenset[int] = field(default=frozenset(), init=False)
    _ends: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the thread that writes and observes heartbeats."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = self._beat()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """Record a step. The first one of a process compiles kernels and has no limit."""
        self._step, self._warm = step, True

    def progressed(self) -> None:
        """Record progress of the main thread within its phase, such as the next microbatch."""
        self._progress += 1

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Mark the phase of the main thread inside the block."""
        before, self._phase = self._phase, name
        self.progressed()
        try:
            yield
        finally:
            self._phase = before
            self.progressed()

    def stop(self, *, in_order: bool = True) -> None:
        """Stop. After a failure the file stays, so that other ranks notice the end of this one."""
        if self._ends.is_set():
            return
        self._ends.set()
        if self._thread is not None:
            # join before removing the file; with a limit, because the file system may hang
            self._thread.join(self._interval())
        if in_order:
            self._remove()

    def silent(self) -> list[Silent]:
        """Return the ranks without a heartbeat for longer than the patience."""
        now = self._beat()
        silences = (self._age(rank, now) for rank in range(self.ranks))
        return [silent for silent in silences if silent is not None]

    def ended(self) -> str | None:
        """Return the ranks of this machine whose processes were gone at the last two checks.

        A rank that leaves in order removes its file before its process ends.
        """
        gone = {r: a for r, a in self._neighbours() if processes.has_ended(a.process)}
        before, self._gone = self._gone, frozenset(gone)
        return ", ".join(f"rank {r} ({gone[r]})" for r in sorted(before & self._gone)) or None

    def _neighbours(self) -> Iterator[tuple[int, Report]]:
        """Return other ranks of this machine, which are consecutive."""
        for row in (range(self.rank + 1, self.ranks), range(self.rank - 1, -1, -1)):
            for rank in row:
                report = self._current(rank)
                if report is not None:
                    if report.host != socket.gethostname():
                        break
                    yield rank, report

    def stuck(self) -> str | None:
        """Describe ranks that run but make no progress.

        A rank checks all ranks when its next one has stalled. Rank 0 detects that all ranks wait.
        """
        following = self._current((self.rank + 1) % self.ranks)
        if following is not None and self._overdue(following, "data"):
            return self._stalled()
        if self.rank == 0 and self._own is not None and self._overdue(self._own, "step"):
            return self._all_waiting()
        return None

    def _mention(self, rank: int) -> None:
        """Warn once, before a collective times out, about a rank in another phase."""
        own, other = self._own, self._current(rank)
        if own is None or own.phase != "step" or own.seconds <= _LATE * self.patience:
            self._mentioned = False
        elif not self._mentioned and other is not None and other.phase == "other":
            self._mentioned = True
            waits = f"rank {self.rank} has waited for {own.seconds:.0f} s, at {own.place}"
            logger().warning("%s; rank %d (%s) is at %s", waits, rank, other, other.place)

    def _stalled(self) -> str | None:
        known = {rank: self._current(rank) for rank in range(self.ranks)}
        stalled = {r: a for r, a in known.items() if a is not None and self._overdue(a, "data")}
        texts = (
            f"rank {rank} ({a}) has stalled for {a.seconds:.0f} s reading data, at {a.place}"
            for rank, a in stalled.items()
        )
        return self._with_stacks("; ".join(texts)) if stalled else None

    def _all_waiting(self) -> str | None:
        ranks_by_place: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            report = self._current(rank)
            if report is None or not self._overdue(report, "step"):
                return None
            ranks_by_place.setdefault(report.place, []).append(rank)
        where = "; ".join(f"{_spans(ranks)} at {place}" for place, ranks in ranks_by_place.items())
        return self._with_stacks(
            f"after step {self._step} all ranks wait for each other, or for their GPUs, for more "
            f"than {self.patience:.0f} s: {where}"
        )

    def _with_stacks(self, text: str) -> str:
        return f"{text}; stacks in {self.folder}/*.stack"

    def _overdue(self, report: Report, phase: Phase) -> bool:
        return report.phase == phase and report.seconds > self.patience

    def _watch(self) -> None:
        while not self._ends.wait(self._interval()):
            # a file system may fail for a moment
            with contextlib.suppress(OSError):
                if self.check():
                    return

    def check(self) -> bool:
        """Write a heartbeat and check the others once; return True if the run had to be ended."""
        now = self._beat()
        if (
            self._has_report()
        ):  # first, because a search for the reason reads the files of all ranks
            self._end(None)
            return True
        following = (self.rank + 1) % self.ranks
        late = self._age(following, now) is not None
        self._late_checks = self._late_checks + 1 if late else 0
        silent = self.silent() if self._late_checks >= _CHECKS else []
        who = ", ".join(map(str, silent))
        reason = f"{who} did not answer" if silent else self.stuck()
        if (gone := self.ended()) is not None:
            reason = f"{gone} has ended"
        if reason is not None:
            self._end(reason)
            return True
        self._mention(following)
        return False

    def _has_report(self) -> bool:
        """Return whether a rank of this run has reported why it ends."""
        try:
            return (self.folder / _REPORTED).stat().st_mtime >= self._began
        except FileNotFoundError:
            return False

    def _end(self, reason: str | None) -> None:
        reported = self._has_report()
        with contextlib.suppress(OSError):
            (self.folder / _REPORTED).touch()
        self._remove()  # otherwise the next rank to check would report this one
        self.hang(None if reported else reason)

    def _interval(self) -> float:
        return min(_EVERY_SECONDS, self.patience / 6)

    def _file(self, rank: int) -> Path:
        return self.folder / str(rank)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file(self.rank).unlink(missing_ok=True)

    def _stack_file(self) -> Path:
        return self.folder / f"{self.rank}.stack"

    def _beat(self) -> float:
        """Write the file and return the time that the file system gives it."""
        phase: Phase = self._phase if self._warm or self._phase == "data" else "other"
        seconds = self._without_progress()
        self._own = Report(
            socket.gethostname(), self._step, phase, _place(), seconds, self._process
        )
        if phase != "other" and seconds > self.patience:
            self._dump_stacks()
        with contextlib.suppress(OSError):  # on a full disk only the time changes
            self._file(self.rank).write_text(json.dumps(asdict(self._own)))
        os.utime(self._file(self.rank))
        return self._file(self.rank).stat().st_mtime

    def _without_progress(self) -> float:
        """Return seconds without progress; a pause of the process counts two intervals at most."""
        looked, progress, seconds = self._last
        now = time.monotonic()
        passed = min(now - looked, 2 * self._interval())
        seconds = seconds + passed if progress == self._progress else 0.0
        self._last = (now, self._progress, seconds)
        return seconds

    def _dump_stacks(self) -> None:
        with contextlib.suppress(OSError), self._stack_file().open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _report(self, rank: int) -> Report | None:
        """Return the last heartbeat of a rank; None if it left, or is writing at this moment."""
        try:
            return Report(**json.loads(self._file(rank).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _current(self, rank: int) -> Report | None:
        """Return a heartbeat written since this rank began to observe; ignore older files."""
        try:
            if self._file(rank).stat().st_mtime < self._began:
                return None
        except FileNotFoundError:
            return None
        return self._report(rank)

    def _age(self, rank: int, now: float) -> Silent | None:
        try:
            seconds = now - max(self._file(rank).stat().st_mtime, self._began)
        except FileNotFoundError:  # the rank has not started yet, or has left in order
            return None
        if seconds <= self.patience:
            return None
        return Silent(rank, seconds, str(self._report(rank) or "no step known"))


def _spans(ranks: Iterable[int]) -> str:
    """Format ranks briefly: `ranks 0-2, 5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'' if words.isdigit() else 's'} {words}"


def _place() -> str:
    """Return the main thread's innermost function, and its innermost one in this package."""
    thread = threading.main_thread().ident
    frame = sys._current_frames().get(thread) if thread is not None else None
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    own = next((f for f in stack if _module(f).partition(".")[0] == "dms_train"), None)
    lines = [_line(f) for f in stack[:1]]
    if own is not None and own is not stack[0]:
        lines.append(_line(own))
    return ", called from ".join(lines)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    code = frame.f_code
    package = _module(frame).partition(".")[0]
    _, inside, file = code.co_filename.rpartition(f"/{package}/")
    file = f"{package}/{file}" if inside else code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {code.co_name}"
