r"""Answers in `\boxed{}`, compared by math-verify."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answers import AnswerForm, Attempt, Verdict, boxed_answer
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document

_INTEGER = re.compile(r"-?[0-9]{1,1000}")


class ExpressionScorer(Scorer):
    r"""The content of the last `\boxed{}` must equal the gold answer."""

    name = "expression"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text; equal wrong answers count as one answer."""
        (gold,) = document.gold
        verdicts = checker.verdicts([Attempt(gold, text) for text in texts])
        wrong = [
            boxed_answer(text) if verdict is Verdict.WRONG else None
            for text, verdict in zip(texts, verdicts, strict=True)
        ]
        same = _representatives([answer for answer in wrong if answer is not None], checker)
        scores = []
        for answer, verdict in zip(wrong, verdicts, strict=True):
            correct = verdict is Verdict.CORRECT
            given = gold if correct else same.get(answer) if answer is not None else None
            scores.append(Score(answers=(given,), correct=(correct,), verdict=verdict.value))
        return scores


def _representatives(answers: list[str], checker: AnswerChecker) -> dict[str, str]:
    """Return, for every answer, the first one that equals it."""
    representatives: dict[str, str] = {}
    for answer in dict.fromkeys(answers):
        known = [o for o in dict.fromkeys(representatives.values()) if not _differ(o, answer)]
        text = f"\\boxed{{{answer}}}"
        verdicts = checker.verdicts([Attempt(other, text, AnswerForm.BOXED) for other in known])
        equal = [o for o, v in zip(known, verdicts, strict=True) if v is Verdict.CORRECT]
        representatives[answer] = equal[0] if equal else answer
    return representatives


def _differ(first: str, second: str) -> bool:
    """Return whether answers are different integers, without the milliseconds of math-verify."""
    integers = _INTEGER.fullmatch(first) and _INTEGER.fullmatch(second)
    return bool(integers) and int(first) != int(second)
