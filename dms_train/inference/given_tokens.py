"""Tokens of a sequence that are given instead of sampled, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from dms_train.inference.outputs import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class GivenTokens:
    """Neighbouring tokens whose log-probabilities are wanted.

    The logits behind one token give the log-probability of the next one.

    Attributes:
        start: Position of the first of them in the sequence, at least 1.
        end: Position behind the last one.
        top: How many of the most likely tokens are returned at each position.
        found: Their log-probabilities so far, in order; they stay when the sequence is preempted.
    """

    start: int
    end: int
    top: int
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def logits_from(self) -> int:
        """Position of the first token whose logits are still wanted."""
        return self.start + len(self.found) - 1

    def positions(self, first: int, count: int) -> range:
        """Which of `count` tokens from position `first` on have logits that are wanted."""
        return range(max(first, self.logits_from), min(first + count, self.end - 1))
