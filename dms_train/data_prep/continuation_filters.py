"""Choice of the continuations that become documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dms_train.data_prep.prompts import Prompt
from dms_train.data_prep.samples import Outcome, latest
from dms_train.evaluation.answers import Attempt, Verdict
from dms_train.evaluation.verification import Verifier

if TYPE_CHECKING:
    from dms_train.inference.outputs import CompletionOutput

_WORKERS = 2  # one comparison takes about a millisecond


@dataclass(slots=True)
class Continuation:
    """One continuation of a prompt.

    Attributes:
        output: Result of the engine.
        outcome: `OPEN` until the answer has been verified, then `KEPT` or the reason for leaving
            the continuation out.
    """

    output: CompletionOutput
    outcome: Outcome


@dataclass(slots=True)
class Continued:
    """A prompt with its continuations; a rejected prompt has none."""

    prompt: Prompt
    continuations: list[Continuation]

    @property
    def outcome(self) -> Outcome:
        """Outcome of the row: the latest one of its continuations."""
        return self.prompt.rejected or latest(one.outcome for one in self.continuations)

    @property
    def kept(self) -> list[CompletionOutput]:
        """Continuations that become documents."""
        return [one.output for one in self.continuations if one.outcome is Outcome.KEPT]


def filter_continuations(
    prompts: Iterable[tuple[Prompt, list[CompletionOutput]]], *, only_finished: bool, verify: bool
) -> Iterator[Continued]:
    """Decide which continuations are kept.

    Args:
        prompts: Prompts with their continuations.
        only_finished: Leave out continuations that do not end in an end-of-text token.
        verify: Leave out continuations whose answer is not the answer of the prompt. A prompt
            without an answer keeps all of its continuations.

    Yields:
        The prompts in the same order.

    Raises:
        EvaluationError: `verify` is set and math-verify is not installed.
    """

    def first(prompt: Prompt, output: CompletionOutput) -> Outcome:
        if output.finish_reason == "memory":
            return Outcome.OUT_OF_MEMORY
        if only_finished and output.finish_reason != "stop":
            return Outcome.UNFINISHED
        return Outcome.OPEN if verify and prompt.answer else Outcome.KEPT

    items = (
        Continued(prompt, [Continuation(output, first(prompt, output)) for output in outputs])
        for prompt, outputs in prompts
    )
    return _verified(items) if verify else items


def _verified(items: Iterable[Continued]) -> Iterator[Continued]:
    with Verifier(_WORKERS) as verifier:
        for item, verdicts in verifier.verified(items, _attempts):
            for continuation, verdict in zip(_open(item), verdicts, strict=True):
                correct = verdict is Verdict.CORRECT
                continuation.outcome = Outcome.KEPT if correct else Outcome(verdict.value)
            yield item


def _attempts(item: Continued) -> list[Attempt]:
    return [Attempt(item.prompt.answer, one.output.text) for one in _open(item)]


def _open(item: Continued) -> list[Continuation]:
    return [one for one in item.continuations if one.outcome is Outcome.OPEN]
