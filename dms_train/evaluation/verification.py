"""Verifies many answers in worker processes, each with a deadline.

The comparison of two expressions can run for ever in code that no signal interrupts, such as the
power of two large numbers. A worker that exceeds the deadline is killed and replaced; its attempt
gets the verdict `timeout`.
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

from dms_train.evaluation.answers import AnswerForm, Attempt, Verdict, verify_answer
from dms_train.evaluation.errors import EvaluationError
from dms_train.observe.processes import end_with_parent

DEADLINE_SECONDS = 20.0  # above the sum of math-verify's own limits, 5 s for each of three calls
_START_SECONDS = 120.0  # a new interpreter and its imports, on a busy machine
_AHEAD_PER_WORKER = 16
Item = TypeVar("Item")
_WORKER_BYTES = 4 << 30  # address space; an expression may be a number of any size


def require_math_verify() -> None:
    """Refuse early where math-verify is not installed.

    Raises:
        EvaluationError: It is not.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise EvaluationError(
            "answers are compared by math-verify, which is not installed; "
            "pip install 'math-verify[antlr4_9_3]' or the extra `data`"
        )


class _Entry:
    """A attempt and, once it is known, its verdict."""

    __slots__ = ("attempt", "verdict")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.verdict: Verdict | None = None


class _Worker:
    """One process and the attempt that it works on."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.entry: _Entry | None = None
        self.deadline = time.monotonic() + _START_SECONDS

    def give(self, entry: _Entry, seconds: float) -> None:
        self.entry = entry
        self.deadline = time.monotonic() + seconds
        self.pipe.send(entry.attempt)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Losses(NamedTuple):
    """Workers that had to be replaced.

    Attributes:
        stuck: Killed at the deadline.
        crashed: Ended by themselves or by something else.
    """

    stuck: int
    crashed: int


class Verifier:
    """Worker processes that verify attempts; use it as a context manager."""

    def __init__(self, workers: int, *, deadline: float = DEADLINE_SECONDS) -> None:
        """Start the processes.

        Args:
            workers: How many.
            deadline: Seconds after which a worker that has not answered is killed.

        Raises:
            EvaluationError: math-verify is not installed.
        """
        require_math_verify()
        self._context = multiprocessing.get_context("spawn")
        self._deadline = deadline
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
        """The verdict of every attempt, in order; attempts are read a little ahead.

        Raises:
            EvaluationError: A worker does not start.
        """
        for _, verdicts in self.verified(attempts, lambda attempt: [attempt]):
            yield verdicts[0]

    def verified(
        self, items: Iterable[Item], attempts: Callable[[Item], list[Attempt]]
    ) -> Iterator[tuple[Item, list[Verdict]]]:
        """Every item with the verdicts of its attempts, in order; items are read a little ahead.

        Raises:
            EvaluationError: A worker does not start.
        """
        stream = iter(items)
        waiting: deque[_Entry] = deque()  # not given to a worker yet
        window: deque[tuple[Item, list[_Entry]]] = deque()  # read, and not yielded yet
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
        """Send attempts, then wait until a worker answers, ends or exceeds its deadline."""
        for worker in self._workers:
            if worker.ready and worker.entry is None and waiting:
                self._give(worker, waiting.popleft())
        soonest = min(worker.deadline for worker in self._workers if _is_busy(worker))
        busy = {worker.pipe: worker for worker in self._workers if _is_busy(worker)}
        for pipe in wait(list(busy), max(0.0, soonest - time.monotonic())):
            assert isinstance(pipe, Connection)
            self._receive(busy[pipe])
        now = time.monotonic()
        for worker in list(self._workers):
            if _is_busy(worker) and now > worker.deadline:
                self._stuck += 1
                self._replace(worker, Verdict.TIMEOUT)

    def _give(self, worker: _Worker, entry: _Entry) -> None:
        try:
            worker.give(entry, self._deadline)
        except OSError:  # it has ended since its last answer
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
    """A worker process: reports that it is ready, then answers attempts until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    verify_answer(
        Attempt("1", "\\boxed{1}", AnswerForm.BOXED)
    )  # imports, and compiles what is cached
    pipe.send(Verdict.CORRECT.value)
    while True:
        try:
            attempt = pipe.recv()
        except EOFError:
            return
        pipe.send(verify_answer(attempt).value)
