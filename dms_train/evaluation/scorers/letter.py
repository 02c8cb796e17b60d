"""Multiple choice: the letter after "Answer:"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answer_text import full_width_to_ascii
from dms_train.evaluation.answers import Verdict, final_text
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document

# A single letter that ends its line, in Markdown or TeX or not.
_ANSWER = re.compile(
    r"Answer:(?:[ \t*$(]|\\\(|\\(?:boxed|text|textbf|mathrm)\{)*([A-D])(?:[)}$*.\s]|\\\))*$"
)


class LetterScorer(Scorer):
    """The letter of the last "Answer:" must be the gold letter."""

    name = "letter"

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text."""
        return [_score(document.gold[0], text) for text in texts]


def _score(gold: str, text: str) -> Score:
    answer = final_text(text)
    if answer is None:
        return Score(answers=(None,), correct=(False,), verdict=Verdict.UNFINISHED.value)
    answer = full_width_to_ascii(answer)
    last = answer.rfind("Answer:")
    match = _ANSWER.match(answer[last:].partition("\n")[0]) if last >= 0 else None
    if match is None:
        return Score(answers=(None,), correct=(False,), verdict=Verdict.NO_ANSWER.value)
    correct = match[1] == gold
    verdict = Verdict.CORRECT if correct else Verdict.WRONG
    return Score(answers=(match[1],), correct=(correct,), verdict=verdict.value)
