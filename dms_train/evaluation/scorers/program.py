"""Programs: all tests of the problem must pass."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dms_train.evaluation.answers import Verdict, final_text
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import SANDBOX
from dms_train.evaluation.programs import ProgramTest, passes
from dms_train.evaluation.scorers.base import AnswerChecker, Marks, Scorer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.livecodebench import program_tests

_BLOCK = re.compile(r"```([\w+-]*)[ \t\r]*\n(.*?)```", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


class ProgramScorer(Scorer):
    """The last block of code after the reasoning, run on the tests of the document."""

    name = "program"
    runs_code = True

    def marks(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Marks]:
        """Run as `Scorer.marks`.

        Raises:
            EvaluationError: Running code was not allowed, or cannot be isolated here.
        """
        if checker.allow_code is None:
            raise EvaluationError("programs of a model run only with --allow-code")
        tests = program_tests(document)
        sandboxed = checker.allow_code == SANDBOX
        return [_marks(text, tests, sandboxed) for text in texts]


def _marks(text: str, tests: list[ProgramTest], sandboxed: bool) -> Marks:
    answer = final_text(text)
    if answer is None:
        return Marks(answers=(None,), correct=(False,), verdict=Verdict.UNFINISHED.value)
    blocks = [code for name, code in _BLOCK.findall(answer) if name.casefold() in _PYTHON]
    if not blocks:
        return Marks(answers=(None,), correct=(False,), verdict=Verdict.NO_ANSWER.value)
    correct = passes(blocks[-1], tests, sandboxed=sandboxed)
    verdict = Verdict.CORRECT if correct else Verdict.WRONG
    return Marks(answers=(blocks[-1],), correct=(correct,), verdict=verdict.value)
