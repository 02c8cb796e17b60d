"""Interface of scorers, which score the texts that a model wrote for one document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from dms_train.evaluation.answers import Attempt, Verdict
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import SANDBOX
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.verification import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one text.

    Attributes:
        answers: The answer given to each question; equal answers of a document are the same text,
            and None is no answer. They are what a majority vote counts.
        correct: True for each right answer.
        verdict: Reason, in a word.
    """

    answers: tuple[str | None, ...]
    correct: tuple[bool, ...]
    verdict: str

    @property
    def share(self) -> float:
        """Share of the questions that are answered right."""
        return sum(self.correct) / len(self.correct)


class AnswerChecker:
    """Services that scorers need; use it as a context manager.

    Args:
        workers: Processes that compare expressions, which start with the first comparison, and
            programs of a model that run at the same time.
        allow_code: One of `options.CODE_MODES`; None runs no program that a model wrote.
    """

    def __init__(self, workers: int = 1, *, allow_code: str | None = None) -> None:
        self.workers = workers
        self._verifier: Verifier | None = None
        self._programs = ThreadPoolExecutor(workers)  # each thread waits for its processes
        self.allow_code = allow_code

    def __enter__(self) -> AnswerChecker:
        """Return the checker itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes; programs that have not started are dropped."""
        self._programs.shutdown(cancel_futures=True)
        if self._verifier is not None:
            self._verifier.__exit__(kind, error, trace)

    def runs_sandboxed(self) -> bool:
        """Return whether programs of a model run in the sandbox.

        Raises:
            EvaluationError: Running them was not allowed.
        """
        if self.allow_code is None:
            raise EvaluationError("programs of a model run only with --allow-code")
        return self.allow_code == SANDBOX

    def score_in_parallel(self, score: Callable[[str], Score], texts: Sequence[str]) -> list[Score]:
        """Return the score of each text; `score` runs programs, once for equal texts.

        Several threads may call this; `workers` texts are scored at a time for all of them.
        """
        distinct = dict.fromkeys(texts)
        scores = dict(zip(distinct, self._programs.map(score, distinct), strict=True))
        return [scores[text] for text in texts]

    def verdicts(self, attempts: Sequence[Attempt]) -> list[Verdict]:
        """Compare answers with their gold answers in processes with deadlines.

        Raises:
            EvaluationError: math-verify is not installed.
        """
        if not attempts:
            return []
        if self._verifier is None:
            self._verifier = Verifier(self.workers)
        return list(self._verifier.verdicts(attempts))


class Scorer(ABC):
    """Judge of texts with a `name`, added as tasks are (`scorers.registry`).

    Attributes:
        name: Name by which tasks refer to the scorer.
        runs_code: True if the scorer runs programs that a model wrote.
    """

    name: ClassVar[str]
    runs_code: ClassVar[bool] = False

    @abstractmethod
    def scores(
        self, document: Document, texts: Sequence[str], checker: AnswerChecker
    ) -> list[Score]:
        """Return the score of each text, in order; several threads may call this.

        Args:
            document: Document that was asked about.
            texts: Texts that a model wrote, reasoning included.
            checker: Compares expressions and runs programs.
        """
