"""Bodies of functions: the tests of the document must pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dms_train.evaluation.answers import Verdict
from dms_train.evaluation.programs import ProgramTest, passes
from dms_train.evaluation.scorers.base import AnswerChecker, Score, Scorer
from dms_train.evaluation.tasks.base import Document

_PASSED = "passed"
# The function and its tests run as a module of their own, as in HumanEval's execution. What they
# print is dropped, and a program that ends early does not print the last line.
_PROGRAM = """\
import io as _io, sys as _sys
_written, _sys.stdout = _sys.stdout, _io.StringIO()
exec({module!r}, {{"__name__": "__main__"}})
_written.write({passed!r})
"""


class CompletionScorer(Scorer):
    """Runs prompt and text as one function on the tests of the document."""

    name = "completion"
    runs_code = True

    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text.

        Raises:
            EvaluationError: Running code was not allowed, or cannot be isolated here.
        """
        sandboxed = checker.runs_sandboxed()
        return checker.score_in_parallel(partial(_score, document, sandboxed=sandboxed), texts)


def _score(document: Document, text: str, sandboxed: bool) -> Score:
    body = text.partition("```")[0]
    details = document.details
    tests = f"{details['test']}\ncheck({details['entry_point']})\n"
    program = _PROGRAM.format(module=f"{document.question}{body}\n{tests}", passed=_PASSED)
    correct = passes(program, [ProgramTest("", _PASSED)], sandboxed=sandboxed)
    verdict = Verdict.CORRECT if correct else Verdict.WRONG
    return Score(answers=(body,), correct=(correct,), verdict=verdict.value)
