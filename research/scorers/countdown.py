"""Judge Countdown: moves must give the target with every number used once."""

from __future__ import annotations

from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document

LARGEST = 100  # largest result
_DIGITS = len(str(LARGEST))  # most digits of a number; int() refuses texts of thousands of digits


class CountdownScorer(Scorer):
    """Scorer that replays the moves after the last `ANS`, such as `4 * 3 , 12 - 1 , 11 * 4`."""

    name = "countdown"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text; `document.details` has `numbers` and `target`."""
        numbers, target = document.details["numbers"], document.details["target"]
        return [_score(numbers, target, text) for text in texts]


def _score(numbers: Sequence[int], target: int, text: str) -> Score:
    _, marker, answer = f" {' '.join(text.split())} ".rpartition(" ANS ")
    if not marker:
        return Score(answers=(None,), correct=(False,), verdict=Verdict.NO_ANSWER.value)
    right = solves(numbers, target, answer)
    verdict = Verdict.CORRECT if right else Verdict.WRONG
    return Score(answers=(answer.strip(),), correct=(right,), verdict=verdict.value)


def solves(numbers: Sequence[int], target: int, answer: str) -> bool:
    """Return whether moves lead from the numbers to the target.

    Every move replaces two numbers by their result, a whole number from 1 to 100; nothing is
    multiplied or divided by 1. The last result is the target, and nothing else is left.
    """
    left = list(numbers)
    for move in answer.split(","):
        words = move.split()
        if len(words) != 3 or not (_is_number(words[0]) and _is_number(words[2])):
            return False
        result = _result(int(words[0]), words[1], int(words[2]))
        if result is None or not 1 <= result <= LARGEST:
            return False
        for used in (int(words[0]), int(words[2])):
            if used not in left:
                return False
            left.remove(used)
        left.append(result)
    return left == [target]


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= _DIGITS


def _result(first: int, operator: str, second: int) -> int | None:
    if operator == "+":
        return first + second
    if operator == "-":
        return first - second
    if 1 in (first, second):
        return None
    if operator == "*":
        return first * second
    if operator == "/" and second and first % second == 0:
        return first // second
    return None
