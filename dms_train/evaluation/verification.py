"""Verification of many answers in worker processes, each with limited time.

The comparison of two expressions can run for ever in code that no signal interrupts, such as the
power of two large numbers. A worker that has used up its processor time is killed and replaced; its
attempt gets the verdict `timeout`. Wall-clock time is limited too, but generously, because a
process that waits for others on a busy machine is not stuck.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from dms_train.evaluation.answers import (
    CALL_SECONDS,
    AnswerForm,
    Attempt,
    Verdict,
    verify_answer,
)
from dms_train.evaluation.errors import EvaluationError
from dms_train.observe.processes import end_with_parent

PROCESSOR_SECONDS = 4 * CALL_SECONDS  # more than three calls of math-verify may take
CLOCK_SECONDS = 600.0
_START_SECONDS = 60.0  # seconds of processor time: a new interpreter and its imports
_SHORTEST_WAIT = 0.05  # seconds; the resolution of processor time
_AHEAD_PER_WORKER = 16
Item = TypeVar("Item")
_WORKER_BYTES = 4 << 30  # address space; an expression may be a number of any size


def require_math_verify() -> None:
    """Refuse early if math-verify is missing.

    Raises:
        EvaluationError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise EvaluationError(
            "answers are compared by math-verify, which is not installed; "
            "pip install 'dms-train[data]'"
        )


class _Entry:
    """An attempt and, once it is known, its verdict."""

    __slots__ = ("attempt", "verdict")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.verdict: Verdict | None = None


class Limits(NamedTuple):
    """Time of one attempt.

    Attributes:
        processor: Seconds that the worker may spend on a processor.
        clock: Seconds of wall time until the worker must have answered.
    """

    processor: float = PROCESSOR_SECONDS
    clock: float = CLOCK_SECONDS


class _Worker:
    """One process and the attempt that it works on."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.entry: _Entry | None = None
        self._limit(Limits(processor=_START_SECONDS))

    def give(self, entry: _Entry, limits: Limits) -> None:
        self.entry = entry
        self._limit(limits)
        self.pipe.send(entry.attempt)

    def _limit(self, limits: Limits) -> None:
        now = time.monotonic()
        self._processor_end = self._processor_time() + limits.processor
        self._clock_end = now + limits.clock
        self.look_at = now + min(limits)

    def has_time(self) -> bool:
        """Return whether no limit is exceeded; `look_at` is when that can change."""
        now = time.monotonic()
        if now < self.look_at:
            return True
        # with one thread, processor time never exceeds wall time
        left = min(self._processor_end - self._processor_time(), self._clock_end - now)
        self.look_at = now + max(left, _SHORTEST_WAIT)
        return left > 0

    def _processor_time(self) -> float:
        import psutil  # not in the base installation

        try:
            used = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # the worker has ended; its pipe reports that
            return 0.0
        return float(used.user + used.system)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_LIMITS = Limits()


class Losses(NamedTuple):
    """Workers that had to be replaced.

    Attributes:
        stuck: Killed when their time was over.
        crashed: Ended by themselves or by something else.
    """

    stuck: int
    crashed: int


class Verifier:
    """Worker processes that verify attempts; use it as a context manager."""

    def __init__(self, workers: int, limits: Limits = _LIMITS) -> None:
        """Start the processes.

        Args:
            workers: Number of worker processes.
            limits: Limits after which a silent worker is killed.

        Raises:
            EvaluationError: math-verify is not installed.
        """
        require_math_verify()
        self._context = multiprocessing.get_context("spawn")
        self._limits = limits
        self._stuck = self._crashed = 0
        self._workers = [_Worker(self._context) for _ in range(workers)]

    def __enter__(self) -> Verifier:
        """Return the verifier itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()

    @property
    def losses(self) -> Losses:
        """Workers replaced so far."""
        return Losses(self._stuck, self._crashed)

    def verdicts(self, attempts: Iterable[Attempt]) -> Iterator[Verdict]:
        """Yield the verdict of every attempt, in order; a few attempts are read in advance.

        Raises:
            EvaluationError: A worker does not start.
        """
        for _, verdicts in self.verified(attempts, lambda attempt: [attempt]):
            yield verdicts[0]

    def verified(
        self, items: Iterable[Item], attempts: Callable[[Item], list[Attempt]]
    ) -> Iterator[tuple[Item, list[Verdict]]]:
        """Yield every item with the verdicts of its attempts, in order; a few are read in advance.

        Raises:
            EvaluationError: A worker does not start.
        """
        stream = iter(items)
        waiting: deque[_Entry] = deque()  # entries that no worker has yet
        window: deque[tuple[Item, list[_Entry]]] = deque()  # items read, not yielded yet
        most = _AHEAD_PER_WORKER * len(self._workers)
        while True:
            for item in islice(stream, most - len(window)):
                entries = [_Entry(attempt) for attempt in attempts(item)]
                window.append((item, entries))
                waiting.extend(entries)
            if not window:
                return
            while window and all(entry.verdict is not None for entry in window[0][1]):
                item, entries = window.popleft()
                yield item, [entry.verdict for entry in entries if entry.verdict is not None]
            if window:
                self._step(waiting)

    def _step(self, waiting: deque[_Entry]) -> None:
        """Send attempts, then wait until a worker answers, ends or may have used up its time."""
        for worker in self._workers:
            if worker.ready and worker.entry is None and waiting:
                self._give(worker, waiting.popleft())
        busy = {worker.pipe: worker for worker in self._workers if _is_busy(worker)}
        soonest = min(worker.look_at for worker in busy.values())
        for pipe in wait(list(busy), max(0.0, soonest - time.monotonic())):
            assert isinstance(pipe, Connection)
            self._receive(busy[pipe])
        for worker in list(self._workers):
            if _is_busy(worker) and not worker.has_time():
                self._stuck += 1
                self._replace(worker, Verdict.TIMEOUT)

    def _give(self, worker: _Worker, entry: _Entry) -> None:
        try:
            worker.give(entry, self._limits)
        except OSError:  # the worker has ended since its last answer
            self._crashed += 1
            self._replace(worker, Verdict.CRASHED)

    def _receive(self, worker: _Worker) -> None:
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            self._crashed += 1
            self._replace(worker, Verdict.CRASHED)
            return
        if worker.entry is not None:
            worker.entry.verdict = Verdict(answer)
        worker.ready, worker.entry = True, None

    def _replace(self, worker: _Worker, verdict: Verdict) -> None:
        worker.kill()
        if not worker.ready:
            raise EvaluationError(
                "a process that compares answers ended while it started; try fewer workers"
            )
        if worker.entry is not None:
            worker.entry.verdict = verdict
        self._workers[self._workers.index(worker)] = _Worker(self._context)


def _is_busy(worker: _Worker) -> bool:
    return worker.entry is not None or not worker.ready


def _work(pipe: Connection) -> None:
    """Run a worker process: report that it is ready, then answer attempts until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # the first call imports modules and fills caches
    verify_answer(Attempt("1", "\\boxed{1}", AnswerForm.BOXED))
    pipe.send(Verdict.CORRECT.value)
    while True:
        try:
            attempt = pipe.recv()
        except EOFError:
            return
        pipe.send(verify_answer(attempt).value)
