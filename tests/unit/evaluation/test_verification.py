"""Worker processes that verify attempts: order, deadlines and lost workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

import pytest

from dms_train.evaluation.answers import Attempt, Verdict, verify_answer
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.verification import Limits, Verifier

STUCK = "\\boxed{3^{10^{10}}}"  # one power of integers, which no signal interrupts


def test_verdicts_come_in_order_and_equal_those_of_one_process() -> None:
    attempts = [Attempt(str(i % 7), f"\\boxed{{{i % 5}}}") for i in range(60)]
    with Verifier(2) as verifier:
        assert list(verifier.verdicts(attempts)) == [verify_answer(attempt) for attempt in attempts]
        assert list(verifier.verdicts([])) == []
        assert verifier.losses == (0, 0)


def test_a_stuck_worker_is_killed_and_replaced() -> None:
    attempts = [Attempt("5", STUCK), *[Attempt("5", "\\boxed{5}")] * 40, Attempt("5", STUCK)]
    with Verifier(1, Limits(processor=1.0)) as verifier:
        verdicts = list(verifier.verdicts(attempts))
        assert verdicts == [Verdict.TIMEOUT, *[Verdict.CORRECT] * 40, Verdict.TIMEOUT]
        assert verifier.losses == (2, 0)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "answer", ["10^{10^{10}}", "2004!!", "9^{9^{9^9}}", "99999999!", "\\frac{1}{10^{10^{10}}}"]
)
def test_a_number_of_any_size_ends_within_the_limits(answer: str) -> None:
    attempts = [Attempt("5", f"\\boxed{{{answer}}}"), Attempt("5", "\\boxed{5.0}")]
    with Verifier(1, Limits(processor=1.0)) as verifier:
        huge, normal = verifier.verdicts(attempts)
    assert huge in (Verdict.TIMEOUT, Verdict.WRONG, Verdict.NO_ANSWER)
    assert normal is Verdict.CORRECT
    text = f"\\boxed{{{answer}}}"
    assert verify_answer(Attempt(answer, text)) is Verdict.CORRECT  # nothing is computed


def test_a_worker_that_is_killed_from_outside_is_replaced() -> None:
    with Verifier(1) as verifier:
        stream = verifier.verdicts(Attempt("5", "\\boxed{5}") for _ in range(40))
        assert next(stream) is Verdict.CORRECT
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        rest = list(stream)
        assert rest.count(Verdict.CRASHED) == 1
        assert rest.count(Verdict.CORRECT) == 38
        assert verifier.losses == (0, 1)


def test_time_in_which_a_worker_does_not_run_is_not_its_own() -> None:
    attempts = (Attempt("5", "\\boxed{5}") for _ in range(40))
    with Verifier(1, Limits(processor=1.0)) as verifier:
        stream = verifier.verdicts(attempts)
        assert next(stream) is Verdict.CORRECT
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (process.pid, signal.SIGCONT)).start()
        assert set(stream) == {Verdict.CORRECT}
        assert verifier.losses == (0, 0)


def test_a_worker_that_sleeps_is_killed_by_the_clock() -> None:
    attempts = (Attempt("5", "\\boxed{5}") for _ in range(40))
    with Verifier(1, Limits(clock=2.0)) as verifier:
        stream = verifier.verdicts(attempts)
        assert next(stream) is Verdict.CORRECT
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        rest = list(stream)
        assert rest.count(Verdict.TIMEOUT) == 1
        assert rest.count(Verdict.CORRECT) == 38
        assert verifier.losses == (1, 0)


def test_claims_are_read_only_a_little_ahead() -> None:
    read = 0

    def attempts():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield Attempt("5", "\\boxed{5}")

    with Verifier(1) as verifier:
        next(verifier.verdicts(attempts()))
    assert read < 100


def test_without_math_verify_the_refusal_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(EvaluationError, match=r"pip install 'dms-train\[data\]'"):
        Verifier(1)
