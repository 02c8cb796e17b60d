"""Sheets of several problems whose answers stand in lines of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict, same_number_or_text
from dms_train.evaluation.options import ANSWER_PATTERN
from dms_train.evaluation.scorers.base import AnswerChecker, Marks, Scorer
from dms_train.evaluation.tasks.base import Document

_PATTERN = re.compile(ANSWER_PATTERN)


class SheetScorer(Scorer):
    """The k-th "The final answer is" must give the k-th gold answer."""

    name = "sheet"

    def marks(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Marks]:
        """As `Scorer.marks`."""
        return [_marks(document.gold, text) for text in texts]


def _marks(gold: tuple[str, ...], text: str) -> Marks:
    given: list[str | None] = [match.group(1).strip() for match in _PATTERN.finditer(text)]
    given = given[: len(gold)]
    given += [None] * (len(gold) - len(given))
    correct = tuple(
        g is not None and same_number_or_text(g, a) for g, a in zip(given, gold, strict=True)
    )
    verdict = Verdict.CORRECT if all(correct) else Verdict.WRONG
    return Marks(answers=tuple(given), correct=correct, verdict=verdict.value)
