"""Programs: all tests of the problem must pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from dms_train.evaluation.answers import Verdict, final_text
from dms_train.evaluation.programs import ProgramTest, passes
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.livecodebench import program_tests

_BLOCK = re.compile(r"```([\w+-]*)[ \t\r]*\n(.*?)```", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


class ProgramScorer(Scorer):
    """Runs the last block of code after the reasoning on the tests of the document."""

    name = "program"
    runs_code = True

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text.

        Raises:
            EvaluationError: Running code was not allowed, or cannot be isolated here.
        """
        sandboxed = checker.runs_sandboxed()
        score = partial(_score, tests=program_tests(document), sandboxed=sandboxed)
        return checker.score_in_parallel(score, texts)


def _score(text: str, tests: list[ProgramTest], sandboxed: bool) -> Score:
    answer = final_text(text)
    if answer is None:
        return Score(answers=(None,), correct=(False,), verdict=Verdict.UNFINISHED.value)
    blocks = [code for name, code in _BLOCK.findall(answer) if name.casefold() in _PYTHON]
    if not blocks:
        return Score(answers=(None,), correct=(False,), verdict=Verdict.NO_ANSWER.value)
    correct = passes(blocks[-1], tests, sandboxed=sandboxed)
    verdict = Verdict.CORRECT if correct else Verdict.WRONG
    return Score(answers=(blocks[-1],), correct=(correct,), verdict=verdict.value)
