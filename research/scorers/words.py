"""Judge the words after the last `ANS` by literal comparison."""

from __future__ import annotations

from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document


class WordsScorer(Scorer):
    """Scorer that compares the k-th part between commas with the k-th gold answer."""

    name = "words"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text; too many parts make all of them wrong."""
        return [_score(document.gold, text) for text in texts]


def _score(gold: tuple[str, ...], text: str) -> Score:
    _, marker, answer = f" {' '.join(text.split())} ".rpartition(" ANS ")
    if not marker:
        none = (None,) * len(gold)
        wrong = (False,) * len(gold)
        return Score(answers=none, correct=wrong, verdict=Verdict.NO_ANSWER.value)
    given: list[str | None] = [part.strip() or None for part in answer.split(",")]
    fits = len(given) <= len(gold)
    given = [*given, *[None] * len(gold)][: len(gold)]
    correct = tuple(fits and part == right for part, right in zip(given, gold, strict=True))
    verdict = Verdict.CORRECT if all(correct) else Verdict.WRONG
    return Score(answers=tuple(given), correct=correct, verdict=verdict.value)
