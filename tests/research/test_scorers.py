"""Scorers of the experiments accept the gold answer in its form, and nothing else."""

from __future__ import annotations

import pytest

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.registry import scorer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.registry import task
from research.registration import TASKS

SOLUTION = "4 * 3 , 12 - 1 , 11 * 4"
FORMS = {
    "countdown": "12 - 1 = 11 : 11 4 > 15 7 44 ! ANS %s",
    "words": "* 9 = 54 + 7 = 0 ! ANS %s",
}
# Wrong, cut off, malformed, or not where it is asked for.
REFUSED = {
    ("countdown", SOLUTION): (
        "ANS 4 * 3 , 12 - 1",  # not all numbers
        "ANS 4 * 3 , 12 - 1 , 11 * 4 , 44",
        "ANS 4 * 3 , 12 - 1 , 11 + 4",
        "ANS 11 * 4",
        "ANS 4 * 3 , 4 * 12 , 48 - 4",  # 4 twice, 1 never
        "ANS 4 * 3 , 12 - 1 , 11 x 4",
        "ANS 4 * 3 , 12 - 1 , 11 * 4 ANS",
        "ANS 4 * 3 , 12 * 1 , 11 * 4",
        "ANS 4 - 4 , 3 - 1 , 0 / 2",
        f"ANS {'9' * 5000} + 1",  # more digits than int() takes
        "4 * 3 , 12 - 1 , 11 * 4",
        "",
    ),
    ("words", "17"): (
        "0 ! ANS 71",
        "0 ! ANS 1 7",
        "0 ! ANS 17 , 17",
        "0 ! ANS 17 ANS",
        "0 ! ANS 17 ANS 18",
        "0 ! 17",
        "",
    ),
}


@pytest.fixture
def checker():
    with AnswerChecker(1) as found:
        yield found


def document(*gold: str) -> Document:
    details = {"numbers": [4, 1, 4, 3], "target": 44}  # of Countdown
    return Document(id="0", question="q", gold=gold, details=details)


@pytest.mark.parametrize("name", [kind.name for kind in TASKS])
def test_gold_answers_of_the_fixtures_are_accepted(name, checker):
    found = task(name)
    documents = found.documents(TaskOptions(fixture=True), lambda messages: 1)
    assert len({each.id for each in documents}) == 5
    for each in documents:
        assert each.question in found.messages(each).user
        text = FORMS[found.scorer] % " , ".join(each.gold)
        (score,) = scorer(found.scorer).scores(each, [text], checker)
        assert score.share == 1.0
        assert None not in score.answers


@pytest.mark.parametrize(("name", "gold"), REFUSED)
def test_wrong_cut_and_malformed_answers_are_refused(name, gold, checker):
    for text in REFUSED[name, gold]:
        (score,) = scorer(name).scores(document(gold), [text], checker)
        assert (score.share, score.correct) == (0.0, (False,)), text


@pytest.mark.parametrize(
    ("numbers", "target", "answer"),
    [
        ([4, 1, 4, 3], 44, "4 * 3 , 12 - 1 , 4 * 11"),  # another order
        ([4, 1, 4, 3], 44, "12 - 1 , 4 * 3"),  # not yet there, and used too much
        ([20, 5, 3, 2], 10, "20 / 5 , 4 * 3 , 12 - 2"),
        ([20, 5, 3, 2], 10, "20 / 3 , 6 + 2 , 8 + 5"),  # a division with a rest
        ([20, 5, 2], 100, "20 * 5 , 100 * 2"),  # above 100
        ([1, 5, 2], 10, "5 * 1 , 5 * 2"),
        ([1, 5, 2], 10, "2 - 1 , 1 + 5"),
        ([3, 5, 2], 4, "3 - 5 , 2 + 2"),  # below 1
    ],
)
def test_countdown_is_played_again(checker, numbers, target, answer):
    found = Document(
        id="0", question="q", gold=("-",), details={"numbers": numbers, "target": target}
    )
    (score,) = scorer("countdown").scores(found, [f"! ANS {answer}"], checker)
    assert score.correct == (answer in ("4 * 3 , 12 - 1 , 4 * 11", "20 / 5 , 4 * 3 , 12 - 2"),)


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("ANS 7 3 , 4", (True, True)),
        ("R 5 ANS 1 . ANS 7  3 ,\n4 ", (True, True)),  # the last one counts
        ("ANS 4 , 7 3", (False, False)),  # another order
        ("ANS 7 3", (True, False)),
        ("ANS , 4", (False, True)),
        ("ANS 73 , 4", (False, True)),
        ("ANS 7 3 , 4 , 5", (False, False)),  # more than was asked for
        ("ANS 7 3 , 4 .", (True, False)),
        ("7 3 , 4", (False, False)),
        ("ANSWER 7 3 , 4", (False, False)),
        ("", (False, False)),
    ],
)
def test_words_are_compared_part_by_part(checker, text, correct):
    (score,) = scorer("words").scores(document("7 3", "4"), [text], checker)
    assert score.correct == correct
    assert (score.verdict == "correct") == all(correct)
    assert (score.verdict == "no_answer") == (score.answers == (None, None))
