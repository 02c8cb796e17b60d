"""Numbers after "The final answer is"."""

from __future__ import annotations

from collections.abc import Sequence

from dms_train.evaluation.answers import AnswerForm, Attempt, Verdict, stated_answer, verify_answer
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document


class StatedScorer(Scorer):
    """The number that the last "The final answer is" names must be the gold number."""

    name = "stated"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text."""
        (gold,) = document.gold
        scores = []
        for text in texts:
            verdict = verify_answer(Attempt(gold, text, AnswerForm.STATED))
            complete = verdict in (Verdict.CORRECT, Verdict.WRONG)
            answer = stated_answer(text) if complete else None
            correct = verdict is Verdict.CORRECT
            scores.append(Score(answers=(answer,), correct=(correct,), verdict=verdict.value))
        return scores
