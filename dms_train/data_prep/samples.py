"""Conversations of a row, and the outcome of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dms_train.data_prep.documents import Message
from dms_train.data_prep.overlap import Overlap
from dms_train.evaluation.answers import Attempt


class Outcome(StrEnum):
    """Outcome of a trace or a row, from the first check to the last.

    A row takes the outcome of the trace that passed the most checks. The names from `crashed` to
    `wrong` are those of `evaluation.answers.Verdict`.
    """

    OPEN = "open"
    MISSING_VALUE = "missing_value"
    EVALUATION_OVERLAP = "evaluation_overlap"
    FLAG_MISMATCH = "flag_mismatch"
    FLAG_FALSE = "flag_false"
    INCOMPLETE = "incomplete"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    UNREADABLE_GOLD = "unreadable_gold"
    UNFINISHED = "unfinished"
    NO_ANSWER = "no_answer"
    WRONG = "wrong"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    NOT_CHOSEN = "not_chosen"
    KEPT = "kept"


_ORDER = {outcome: rank for rank, outcome in enumerate(Outcome)}


def latest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of a row whose traces or continuations have these outcomes."""
    return max(outcomes, key=lambda outcome: _ORDER[outcome])


@dataclass(slots=True)
class Trace:
    """Conversation of a row.

    Attributes:
        messages: Turns of the conversation.
        attempt: Attempt to verify; None if there is nothing to verify.
        outcome: `OPEN` until a check decides.
    """

    messages: list[Message]
    attempt: Attempt | None = None
    outcome: Outcome = Outcome.OPEN


@dataclass(slots=True)
class Sample:
    """One row.

    Attributes:
        number: Number of the row.
        source: Number of its input.
        where: File and row, for messages.
        key: Name of the row; empty if it has none.
        problem: Text to compare with evaluation sets.
        traces: Conversations of the row.
        rejected: Reason for rejecting the whole row; None if it is not rejected.
        overlap: Overlap with an evaluation set.
    """

    number: int
    source: int
    where: str
    key: str
    problem: str
    traces: list[Trace] = field(default_factory=list)
    rejected: Outcome | None = None
    overlap: Overlap | None = None

    @property
    def open(self) -> list[Trace]:
        """Traces without a final outcome."""
        if self.rejected is not None:
            return []
        return [trace for trace in self.traces if trace.outcome is Outcome.OPEN]

    @property
    def outcome(self) -> Outcome:
        """Return the outcome of the row."""
        if self.rejected is not None:
            return self.rejected
        return latest(trace.outcome for trace in self.traces)

    def record(self) -> dict[str, Any]:
        """Return the row's line of the verdicts file."""
        row: dict[str, Any] = {"row": self.number, "key": self.key, "outcome": self.outcome.value}
        if self.rejected is None:
            row["traces"] = [trace.outcome.value for trace in self.traces]
        if self.overlap is not None:
            row["overlap"] = self.overlap._asdict()
        return row
