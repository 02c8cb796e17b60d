"""RULER's metric: the share of the references that the text contains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document


class ContainsScorer(Scorer):
    """Every reference must stand in the text as a whole word, in capitals or not.

    RULER (`string_match_all`) also accepts a reference inside a longer word or number.
    """

    name = "contains"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text."""
        return [_score(document.gold, text) for text in texts]


def _score(references: tuple[str, ...], text: str) -> Score:
    correct = tuple(_contains(text, reference) for reference in references)
    answers = tuple(r if c else None for r, c in zip(references, correct, strict=True))
    verdict = Verdict.CORRECT if all(correct) else Verdict.WRONG
    return Score(answers=answers, correct=correct, verdict=verdict.value)


def _contains(text: str, reference: str) -> bool:
    pattern = rf"(?<![A-Za-z0-9]){re.escape(reference)}(?![A-Za-z0-9])"
    return re.search(pattern, text, re.IGNORECASE) is not None
