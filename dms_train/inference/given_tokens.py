"""Tokens of a sequence that are given instead of sampled, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from dms_train.inference.outputs import GivenScores, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class GivenTokens:
    """Neighbouring tokens whose log-probabilities are wanted.

    The logits behind one token give the log-probability of the next one. Scores found so far stay
    when the sequence is preempted.

    Attributes:
        start: Position of the first of them in the sequence, at least 1.
        end: Position behind the last one.
        top: How many of the most likely tokens are returned at each position; None for `scores`
            alone, without `entries`.
        scores: Of the tokens so far.
        entries: Of the same tokens, with the most likely ones.
    """

    start: int
    end: int
    top: int | None = None
    scores: GivenScores = field(default_factory=lambda: GivenScores([], []))
    entries: list[TokenLogprobs] = field(default_factory=list)

    @property
    def logits_from(self) -> int:
        """Position of the first token whose logits are still wanted."""
        return self.start + len(self.scores.logprobs) - 1

    def positions(self, first: int, count: int) -> range:
        """Which of `count` tokens from position `first` on have logits that are wanted."""
        return range(max(first, self.logits_from), min(first + count, self.end - 1))
