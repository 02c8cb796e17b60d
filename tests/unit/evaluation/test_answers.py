"""Right and wrong answers: gold answers in any form are accepted, near misses are not."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from math_verify.errors import TimeoutException

from dms_train.evaluation.answers import (
    AnswerForm,
    Attempt,
    Verdict,
    processor_limit,
    same_number_or_text,
    verify_answer,
)

BOXED = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct."
STATED = "The final answer is %s."
EXPRESSIONS = [
    *("5", "-5", "073", "1,000", "0.25", "90^\\circ", "\\$18", "18\\text{ cm}", "17_8", "10\\%"),
    *("\\frac{14}{3}", "\\frac43", "\\frac 59", "\\frac9{19}", "\\frac{270}7\\text{ degrees}"),
    *("70 \\sqrt{2}", "\\sqrt2", "-\\frac{\\pi}{6}", "\\cot x", "x^2+2x+1", "y=2x-1", "x<1"),
    *("\\left( 3, \\frac{\\pi}{2} \\right)", "[1,2)", "\\{1,2\\}", "1,-2", "6 - 5i", "p - q"),
    *("\\text{Evelyn}", "Evelyn", "\\text{(C)}", "\\text{odd}", "\\emptyset", "3:00"),
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
]


@pytest.fixture(scope="module")
def problems() -> Path:
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("DMS_TEST_DATA", default)) / "problems"
    if not folder.is_dir():
        pytest.skip("set DMS_TEST_DATA to the folder with the real input files")
    return folder


@pytest.mark.parametrize("answer", EXPRESSIONS)
def test_a_gold_answer_in_its_box_is_correct(answer: str) -> None:
    assert verify_answer(Attempt(answer, BOXED % answer)) is Verdict.CORRECT
    reasoning = "<think>\nIs it \\boxed{123}? No.\n</think>\n\n"
    assert verify_answer(Attempt(answer, reasoning + BOXED % answer)) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\frac{1}{2}", "0.5"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("x<1", "(-\\infty,1)"),
        ("1,2", "2,1"),
        ("\\frac43", "\\dfrac{4}{3}"),
        ("5", "5\\text{ cm}"),
        ("18\\text{ cm}", "18\\text{ centimeters}"),
        ("Evelyn", "\\text{ evelyn}"),
        ("1000", "1{,}000"),
        ("2 m n", "2mn"),
        ("4 g h", "4gh"),
        ("\\frac{1}{2} m v^2", "\\frac{1}{2}mv^2"),
        ("\\frac{1}{2} b h", "\\frac12 bh"),
        ("3 + 2 m", "2m+3"),
        ("k+3 s", "3s+k"),
        ("3 m/s", "3"),
        ("9.8 m/s^2", "9.8\\text{ m/s}^2"),
        ("5", "5 €"),
        ("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt{3}}2"),
        ("infinity", "\\infty"),
        ("\\infty", "\\text{infinity}"),
        ("-\\infty", "-infinity"),
    ],
)
def test_another_way_to_write_it_is_correct(gold: str, answer: str) -> None:
    assert verify_answer(Attempt(gold, BOXED % answer)) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5", "So the answer is \\boxed{5}!"),
        ("5", "So the answer is **\\boxed{5}!**"),
        ("5", "\\boxed{5}\n{done}"),
        ("80", "$\\boxed{80}^\\circ$"),
        ("80^\\circ", "$\\boxed{80}^{\\circ}$"),
        ("80,90", "$\\boxed{80}^\\circ$ and $\\boxed{90}^\\circ$"),
    ],
)
def test_punctuation_and_degrees_may_follow_a_box(gold: str, text: str) -> None:
    assert verify_answer(Attempt(gold, text)) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,200", "1200", True),
        ("- 5", "-5", True),
        ("$ 5", "5.0", True),
        ("10%", "10", True),
        ("007", " 007", True),
        ("0.5", ".5", True),
        ("1 2", "12", False),
        ("007", "7", False),
        ("7", "007", False),
    ],
)
def test_numbers_are_the_same_by_value_and_codes_by_text(one: str, other: str, same: bool) -> None:
    assert same_number_or_text(one, other) is same


# Gold answer and a text that must not pass: wrong, malformed, cut off, or in no box.
REFUSED = [
    ("5", "\\boxed{6}"),
    ("5", "\\boxed{-5}"),
    ("5", "\\boxed{5"),
    ("5", "\\boxed{}"),
    ("5", "\\boxed{5}{6}"),
    ("5", "\\boxed{5}0"),
    ("5", "$\\boxed{5}!$"),
    ("5", "$\\boxed{5}^2$"),
    ("90", "$\\boxed{80}^\\circ$ and $\\boxed{90}^\\circ$"),
    ("2\\pi r h", "\\boxed{2\\pi}"),
    ("\\pi r l", "\\boxed{\\pi}"),
    ("3 x t", "\\boxed{3 y t}"),
    ("3 x t", "\\boxed{3}"),
    ("2 m n", "\\boxed{2}"),
    ("2m/n", "\\boxed{2}"),
    ("\\frac{1}{2} b h", "\\boxed{\\frac12}"),
    ("3 + 2 m", "\\boxed{5}"),
    ("infinity", "\\boxed{-\\infty}"),
    ("5", "\\boxed{5)}"),
    ("5", "\\boxed{5?}"),
    ("5", "\\boxed{5!}"),
    ("5", "\\boxed{5+}"),
    ("5", "\\boxed{\\ne 5}"),
    ("5", "\\boxed{>5}"),
    ("5", "\\boxed{\\pm 5}"),
    ("5", "\\boxed{5.00001}"),
    ("5", "\\boxed{5,6}"),
    ("5", "\\boxed{51} or \\boxed{5}"),
    ("5", "\\boxed{5}. No: the final answer is $\\boxed{6}$"),
    ("5", "First \\boxed{5}. " + "Let me check. " * 20 + "\\boxed{6}"),
    ("5", "First \\boxed{5}. " + "Let me check. " * 20 + "\\boxed{6"),
    ("5", "5"),
    ("5", "So there are 2 + 3 = 5 of them"),
    ("5", "<think>\nI think $\\boxed{5}$"),
    ("5", "<think>\nI think $\\boxed{5}$\n</think>\n\nSo it is clear."),
    ("5", "<think>a</think> First. <think>$\\boxed{5}$"),
    ("5", ""),
    ("\\frac{14}{3}", "\\boxed{\\frac{14}{}}"),
    ("\\frac{14}{3}", "\\boxed{\\frac{14}{3}"),
    ("\\frac{14}{3}", "\\boxed{\\frac{3}{14}}"),
    ("\\frac{1}{3}", "\\boxed{0.333}"),
    ("\\pi", "\\boxed{3.14}"),
    ("12", "\\boxed{1 2}"),
    ("0", "\\boxed{\\frac{0}{0}}"),
    ("17", "\\boxed{17_8}"),
    ("17_8", "\\boxed{17_9}"),
    ("18\\text{ cm}", "\\boxed{18\\text{ m}}"),
    ("11\\text{ a.m.}", "\\boxed{11\\text{ p.m.}}"),
    ("(1,2)", "\\boxed{(2,1)}"),
    ("(1,2)", "\\boxed{\\{1,2\\}}"),
    ("[1,2)", "\\boxed{[1,2]}"),
    ("x<1", "\\boxed{x \\leq 1}"),
    ("x+1", "\\boxed{x+2}"),
    ("x=5", "\\boxed{y=5}"),
    ("Evelyn", "\\boxed{nelyvE}"),
    ("Evelyn", "Evelyn"),
    ("\\text{east}", "\\boxed{\\text{west}}"),
    ("\\text{(A)}", "\\boxed{B}"),
    ("\\emptyset", "\\boxed{0}"),
]


@pytest.mark.parametrize(("gold", "text"), REFUSED)
def test_a_wrong_malformed_or_cut_answer_is_not_correct(gold: str, text: str) -> None:
    assert verify_answer(Attempt(gold, text)) in (
        Verdict.WRONG,
        Verdict.NO_ANSWER,
        Verdict.UNFINISHED,
    )


def test_verdicts_say_why() -> None:
    assert verify_answer(Attempt("5", "\\boxed{6}")) is Verdict.WRONG
    assert verify_answer(Attempt("5", "\\boxed{5")) is Verdict.NO_ANSWER
    assert verify_answer(Attempt("5", "<think>\\boxed{5}")) is Verdict.UNFINISHED
    assert verify_answer(Attempt("", "\\boxed{5}")) is Verdict.UNREADABLE_GOLD
    unfinished = Attempt("5", "<think>\\boxed{5}", allow_unfinished=True)
    assert verify_answer(unfinished) is Verdict.CORRECT


@pytest.mark.parametrize("gold", ["18", "-3", "448,000", "0.5", "12.50"])
def test_a_stated_number_is_correct(gold: str) -> None:
    for text in (STATED, "The final answer is $%s", "So.\nThe final answer is %s dollars.\n"):
        assert verify_answer(Attempt(gold, text % gold, AnswerForm.STATED)) is Verdict.CORRECT
    earlier = f"The final answer is 7. No.\n{STATED % gold}"
    assert verify_answer(Attempt(gold, earlier, AnswerForm.STATED)) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("18", "The final answer is **18**."),
        ("18", "**The final answer is:** 18"),
        ("18", "The final answer is: $\\boxed{18}$."),
        ("18", "The final answer is $18 \\text{ dollars}$"),
        ("18", "The final answer is \\(18\\%\\)"),
        ("18", "The final answer is \uff11\uff18\u3002"),
        ("18", "the final answer is $18.00"),
        ("-5", "The final answer is \u22125"),
        ("-5", "The final answer is -$5"),
        ("1234", "The final answer is 1{,}234"),
        ("0.5", "The final answer is .5"),
        ("$18", "The final answer is 18"),
    ],
)
def test_a_stated_number_may_be_decorated(gold: str, text: str) -> None:
    assert verify_answer(Attempt(gold, text, AnswerForm.STATED)) is Verdict.CORRECT


@pytest.mark.parametrize(
    "text",
    [
        "The final answer is 19.",
        "The final answer is 18 = x",
        "The final answer is 18\\cdot 2",
        "The final answer is 18½",
        "The final answer is 1",
        "The final answer is -18.",
        "The final answer is 18/5.",
        "The final answer is 18 or 19.",
        "The final answer is 18.5.",
        "The final answer is 18,00.",
        "The final answer is 18 * 2",
        "The final answer is eighteen.",
        "The final answer is",
        "The final answer is 18. No, wait. The final answer is 19.",
        "The final answer is 18. No, wait. The final answer is",
        "There are 18.",
        "<think>The final answer is 18.",
    ],
)
def test_another_stated_number_is_not_correct(text: str) -> None:
    assert verify_answer(Attempt("18", text, AnswerForm.STATED)) is not Verdict.CORRECT


@pytest.mark.parametrize(
    ("name", "rows", "form", "phrase"),
    [
        ("math500", 250, AnswerForm.BOXED, BOXED),
        ("gsm8k", 400, AnswerForm.STATED, STATED),
        ("gsm8k", 400, AnswerForm.BOXED, BOXED),
        ("linear_1d", 2000, AnswerForm.STATED, STATED),
    ],
)
def test_every_published_gold_answer_is_accepted(
    problems: Path, name: str, rows: int, form: AnswerForm, phrase: str
) -> None:
    lines = (problems / f"{name}.jsonl").read_text("utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    assert len(golds) == rows
    refused = [
        g for g in golds if verify_answer(Attempt(g, phrase % g, form)) is not Verdict.CORRECT
    ]
    assert refused == []


def test_math500_reference_solutions_are_accepted(problems: Path) -> None:
    rows = [json.loads(line) for line in (problems / "math500.jsonl").open(encoding="utf-8")]
    attempts = [Attempt(row["answer"], row["solution"]) for row in rows]
    assert [attempt for attempt in attempts if verify_answer(attempt) is not Verdict.CORRECT] == []


def test_a_thread_cannot_judge() -> None:
    caught: list[Exception] = []

    def run() -> None:
        try:
            verify_answer(Attempt("5", "\\boxed{5.0}"))
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "thread" in str(caught[0])


@pytest.mark.parametrize(
    "answer",
    ["9" * 5000, f"3 {'9' * 5000}/2", f"0.\\overline{{{'3' * 5000}}}", "5\\text{a }  " * 40 + "x"],
)
def test_an_answer_of_any_length_has_a_verdict(answer: str) -> None:
    assert verify_answer(Attempt("5", f"\\boxed{{{answer}}}")) in (Verdict.WRONG, Verdict.NO_ANSWER)
    stated = Attempt("5", f"The final answer is {answer}", AnswerForm.STATED)
    assert verify_answer(stated) in (Verdict.WRONG, Verdict.NO_ANSWER)
    assert verify_answer(Attempt("5", "\\boxed{" * 5000)) is Verdict.NO_ANSWER


def _busy(catches: int = 0) -> None:
    """Computes for ever; the first limits that strike are caught."""
    while True:
        try:
            while True:
                sum(range(1000))
        except TimeoutException:
            if not catches:
                raise
            catches -= 1


def test_a_limit_counts_processor_time_not_time_of_the_clock() -> None:
    with processor_limit(0.2):
        time.sleep(0.6)
    with pytest.raises(TimeoutException), processor_limit(0.2):
        _busy()
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_limit_strikes_again_where_the_first_time_was_caught() -> None:
    with pytest.raises(TimeoutException), processor_limit(0.1):
        _busy(catches=2)
