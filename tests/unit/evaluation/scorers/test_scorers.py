"""Scorers accept the gold answer in the form that its task asks for, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import all_scorers
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.registry import all_tasks

SCORERS = all_scorers()
TASKS = {name: task for name, task in all_tasks().items() if not SCORERS[task.scorer].runs_code}
BOX = "</think>Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"
FORMS = {
    "expression": BOX,
    "stated": "So.\nThe final answer is %s",
    "letter": "<think>B?</think>\nAnswer: %s",
    "contains": " %s.",
    "sheet": "Divide.\nThe final answer is %s.\n",
}


@pytest.fixture(scope="module")
def checker():
    with AnswerChecker(1) as found:
        yield found


def document(*gold: str) -> Document:
    return Document(id="0", question="q", gold=gold)


def in_form(scorer: str, gold: tuple[str, ...]) -> str:
    return "".join(FORMS[scorer] % answer for answer in gold)


def test_the_forms_are_all():
    programs = {name for name, scorer in SCORERS.items() if scorer.runs_code}
    assert set(FORMS) == set(SCORERS) - programs  # programs have tests of their own


@pytest.mark.parametrize("name", TASKS)
def test_gold_answers_of_the_package_are_accepted(name, checker):
    task = TASKS[name]
    for found in task.documents(TaskOptions(fixture=True), lambda messages: 1):
        text = in_form(task.scorer, found.gold)
        (score,) = SCORERS[task.scorer].scores(found, [text], checker)
        assert score.share == 1.0
        assert all(score.correct)
        assert None not in score.answers


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [("math500", "math500", 250), ("gsm8k", "gsm8k", 400), ("linear_1d", "linear_1d", 2000)],
)
def test_gold_answers_of_published_files_are_accepted(name, file, rows, checker):
    default = Path(__file__).parents[5] / "shared" / "data"
    folder = Path(os.environ.get("DMS_TEST_DATA", default)) / "problems"
    if not folder.is_dir():
        pytest.skip("set DMS_TEST_DATA to the folder with the real input files")
    task = TASKS[name]
    options = TaskOptions(path=str(folder / f"{file}.jsonl"), subset=True)
    documents = task.documents(options, lambda messages: 1)
    assert len(documents) == rows == len(json.loads(json.dumps([d.id for d in documents])))
    accepted = sum(
        SCORERS[task.scorer].scores(d, [in_form(task.scorer, d.gold)], checker)[0].share == 1.0
        for d in documents
    )
    assert accepted == rows


# Scorer, gold, text: wrong, cut off, malformed, or not where it is asked for.
REFUSED = [
    ("expression", "5", "</think>$\\boxed{6}$"),
    ("expression", "5", "</think>$\\boxed{5"),
    ("expression", "5", "</think>5"),
    ("expression", "5", "</think>\\boxed{}"),
    ("expression", "5", "<think>\\boxed{5}"),
    ("expression", "5", "</think>\\boxed{5} or \\boxed{6}"),
    ("expression", "5", "</think>\\boxed{5,6}"),
    ("expression", "073", "</think>\\boxed{74}"),
    ("expression", "\\frac{1}{3}", "</think>\\boxed{0.33}"),
    ("expression", "\\frac{1}{3}", "</think>\\boxed{\\frac{1}{}}"),
    ("expression", "17_8", "</think>\\boxed{17_9}"),
    ("expression", "(1,2)", "</think>\\boxed{(2,1)}"),
    ("expression", "x+1", "</think>\\boxed{x-1}"),
    ("expression", "\\sqrt{2}", "</think>\\boxed{1.41}"),
    ("stated", "18", "The final answer is 19"),
    ("stated", "18", "The final answer is 1"),
    ("stated", "18", "The final answer is 18/5"),
    ("stated", "18", "The final answer is 18 or 19"),
    ("stated", "18", "The final answer is"),
    ("stated", "18", "It is 18"),
    ("stated", "18", "<think>The final answer is 18"),
    ("stated", "18", "The final answer is 18. No. The final answer is 8"),
    ("letter", "B", "Answer: C"),
    ("letter", "B", "Answer: b"),
    ("letter", "B", "Answer: B or C"),
    ("letter", "B", "Answer: BC"),
    ("letter", "B", "Answer: "),
    ("letter", "B", "B"),
    ("letter", "B", "<think>Answer: B"),
    ("letter", "B", "Answer: B\nNo.\nAnswer: A"),
    ("letter", "B", "Answer: B\nNo.\nAnswer:"),
    ("contains", "1234567", "12345678"),
    ("contains", "1234567", "the number is 123456"),
    ("contains", "1234567", "1234 567"),
    ("contains", "ABCDE", "XABCDE"),
    ("contains", "ABCDE", ""),
    ("sheet", "15", "The final answer is 1"),
    ("sheet", "15", "The final answer is 150."),
    ("sheet", "15", "The final answer is 14.\nThe final answer is 15."),
    ("sheet", "15", "Divide: c = 15"),
    ("sheet", "15", "The final ans"),
    ("sheet", "-3", "The final answer is 3."),
]


@pytest.mark.parametrize("scorer", FORMS)
def test_wrong_cut_and_malformed_answers_are_refused(scorer, checker):
    cases = [case for case in REFUSED if case[0] == scorer]
    assert len(REFUSED) >= 40
    assert cases
    for _, gold, text in cases:
        (score,) = SCORERS[scorer].scores(document(gold), [text], checker)
        assert (score.share, score.correct) == (0.0, (False,)), text


def test_equal_wrong_expressions_are_one_answer(checker):
    boxes = ["\\frac{1}{2}", "0.5", "7", "\\frac{2}{4}", "3", "7.0", "\\sqrt{9}"]
    texts = [f"</think>$\\boxed{{{box}}}$" for box in boxes] + ["<think>", "</think>nothing"]
    scores = SCORERS["expression"].scores(document("7"), texts, checker)
    assert [score.answers[0] for score in scores] == [
        *("\\frac{1}{2}", "\\frac{1}{2}", "7", "\\frac{1}{2}", "3", "7", "3", None, None)
    ]
    assert [score.correct[0] for score in scores] == [box in ("7", "7.0") for box in boxes] + [
        False,
        False,
    ]
    assert [score.verdict for score in scores[-2:]] == ["unfinished", "no_answer"]


def test_different_integers_are_not_compared_as_expressions(checker, monkeypatch):
    """Only the gold answer is, and what is written in another way."""
    boxes, asked = ["3", "12", "-12", "x", "3", "012", "4"], []
    texts = [f"</think>\\boxed{{{box}}}" for box in boxes]
    verdicts = checker.verdicts

    def watched(attempts):
        asked.append(len(attempts))
        return verdicts(attempts)

    monkeypatch.setattr(checker, "verdicts", watched)
    scores = SCORERS["expression"].scores(document("5"), texts, checker)
    assert [score.answers[0] for score in scores] == ["3", "12", "-12", "x", "3", "12", "4"]
    assert asked == [7, 0, 0, 0, 3, 2, 1]


def test_stated_numbers_are_one_answer_however_they_are_written(checker):
    texts = ["The final answer is 1,200", "The final answer is $1200.00", "The final answer is 12"]
    scores = SCORERS["stated"].scores(document("1200"), texts, checker)
    assert [score.answers[0] for score in scores] == ["1200", "1200", "12"]


def test_letters_are_found_in_markdown_and_tex(checker):
    plain = ("Answer: B", "Answer: (B).", "So.\nAnswer: $B$ \n", "Answer: B)\n")
    decorated = (
        "**Answer: B**",
        "**Answer:** B",
        "Answer: \\(\\boxed{\\text{B}}\\)",
        "Answer\uff1a\uff22",
    )
    for text in (*plain, *decorated):
        (score,) = SCORERS["letter"].scores(document("B"), [text], checker)
        assert score.correct == (True,), text


def test_a_sheet_counts_each_problem(checker):
    text = "The final answer is 1.\nThe final answer is 9.\n"
    (score,) = SCORERS["sheet"].scores(document("1", "2", "3"), [text], checker)
    assert score.correct == (True, False, False)
    assert score.answers == ("1", "9", None)
    assert score.share == pytest.approx(1 / 3)


def test_numbers_of_a_sheet_are_compared_as_numbers(checker):
    text = "The final answer is 1,200.\nThe final answer is \u22123.\nThe final answer is $5.\n"
    (score,) = SCORERS["sheet"].scores(document("1200", "-3", "5"), [text], checker)
    assert score.correct == (True, True, True)
    (score,) = SCORERS["sheet"].scores(document("1200", "3", "50"), [text], checker)
    assert score.correct == (True, False, False)


def test_references_count_each(checker):
    (score,) = SCORERS["contains"].scores(document("ABCDE", "FGHIJ"), ["abcde, X"], checker)
    assert score.share == 0.5
