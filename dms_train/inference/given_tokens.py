"""Given tokens of a sequence, which are scored instead of sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from dms_train.inference.outputs import GivenScores, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class GivenTokens:
    """A contiguous range of tokens to score.

    The logits at one token give the log-probability of the next token. A preemption keeps the
    scores computed so far.

    Attributes:
        start: Position of the first token in the sequence, at least 1.
        end: Position after the last token.
        top: Number of the most likely tokens to return at each position; None computes `scores`
            only, without `entries`.
        scores: Scores computed so far.
        entries: Log-probabilities of the same tokens and of the most likely ones.
    """

    start: int
    end: int
    top: int | None = None
    scores: GivenScores = field(default_factory=lambda: GivenScores([], []))
    entries: list[TokenLogprobs] = field(default_factory=list)

    @property
    def logits_from(self) -> int:
        """Position of the first token whose logits are still needed."""
        return self.start + len(self.scores.logprobs) - 1

    def positions(self, first: int, count: int) -> range:
        """Return the positions whose logits are needed, of `count` tokens from `first` on."""
        return range(max(first, self.logits_from), min(first + count, self.end - 1))
