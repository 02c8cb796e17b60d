"""Sheets of several problems whose answers stand in lines of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict, same_number_or_text
from dms_train.evaluation.options import ANSWER_PATTERN
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document


class SheetScorer(Scorer):
    """The k-th match of a pattern must give the k-th gold answer; later matches do not count.

    Args:
        pattern: Regular expression with one group, which matches an answer.
    """

    name = "sheet"

    def __init__(self, pattern: str = ANSWER_PATTERN) -> None:
        self._pattern = re.compile(pattern)

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text."""
        return [self._score(document.gold, text) for text in texts]

    def _score(self, gold: tuple[str, ...], text: str) -> Score:
        given: list[str | None] = [match[1].strip() for match in self._pattern.finditer(text)]
        given = given[: len(gold)]
        given += [None] * (len(gold) - len(given))
        correct = tuple(
            g is not None and same_number_or_text(g, a) for g, a in zip(given, gold, strict=True)
        )
        verdict = Verdict.CORRECT if all(correct) else Verdict.WRONG
        return Score(answers=tuple(given), correct=correct, verdict=verdict.value)
