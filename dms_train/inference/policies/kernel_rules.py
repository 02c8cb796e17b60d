"""Kernel rules: plain data that tells the decode kernels how to serve a policy.

Shape letters: b sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from dms_train.inference.errors import InferenceError

NEVER, EVERY, MARKED = "never", "every", "marked"  # tokens that a `WindowRule` evicts
OLDEST, LEAST = "oldest", "least"  # tokens that a `BudgetRule` evicts
# scores of a `BudgetRule`
COLUMN_SUMS, NEWEST_WEIGHTS, RETENTION = "column sums", "newest weights", "retention"


class Limits(NamedTuple):
    """Budgets of the sequences of a pass, as a `BudgetRule` needs them.

    Attributes:
        most: Integers [b]: for LEAST the number of tokens in a KV list, for OLDEST the number of
            first tokens that stay.
        recent: Integers [b], number of newest tokens that always stay.
    """

    most: Tensor
    recent: Tensor


@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """Evict tokens that leave a window of newest tokens.

    The kernels decide in prompts as well. This rule and `MergeRule` also run on pages in FP8.

    Attributes:
        evicts: NEVER, EVERY token that leaves the window, or the tokens MARKED by the model's
            decisions.
        window: Number of tokens before a query that it always reads, besides its own token.
        shift: Distance from a token to the decision that marks it.
    """

    evicts: str
    window: int = 0
    shift: int = 0

    def keeps_all(self, tokens: int) -> bool:
        """Return whether a sequence of this length has lost none of its tokens."""
        return self.evicts == NEVER or tokens <= self.window + 1


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """Merge a token into the entry of its predecessor where the key's eviction channel says so.

    An entry is evicted when a token that continues it is stored. The hook `accumulate` merges
    prompts; its entries "key", "value" and "weights" hold the newest tokens.

    Attributes:
        tokens: Newest tokens that an entry averages.
        shift: Distance from a token to the decision that merges it.
        channel: Eviction channel of query and key heads; -1 is the last one.
        scale: Factor on the activation of the key, which decides.
        offset: Subtracted from the scaled activation; a positive result merges.
        importance_offset: Added to the mean activation of the queries; the sigmoid of the sum is
            the weight.
        smallest: Added to the weight.
        uniform: Whether all tokens have the weight 1 instead.
    """

    tokens: int
    shift: int
    channel: int
    scale: float
    offset: float
    importance_offset: float
    smallest: float
    uniform: bool


@dataclass(frozen=True, kw_only=True)
class BudgetRule:
    """Keep to the budget of the hook `limits`.

    In prompts, and after every `interval` generated tokens, the hooks `observe` and `evict_mask`
    decide with torch operations. They may use key, value, state and recent queries, but no tensors
    of KV lists. After any other generated token the kernels evict one token or none.

    Attributes:
        evicts: Token that the kernels evict from a KV list that exceeds its `limits`. With NEVER,
            there is none. With OLDEST, it is the oldest unprotected token. With LEAST, it is the
            token with the lowest score.
        score: Score for LEAST, stored as the policy's state, one number. COLUMN_SUMS is the
            attention that a token has received so far, NEWEST_WEIGHTS the attention of the newest
            query. RETENTION is the age of a token times the number that the hook `retention` gave
            it when it arrived; it reads no attention.
        reduce: How the query heads of a KV head make one score: "mean", "max" or "sum".
        together: Whether the KV heads of a layer share one score, the mean over all query heads,
            and evict the same positions.
        streams: Whether prompt tokens beyond the budget are computed like generated ones.
        interval: Generated tokens between two evictions by the hooks; None for none. Needs NEVER.
    """

    evicts: str
    score: str | None = None
    reduce: str = "mean"
    together: bool = False
    streams: bool = False
    interval: int | None = None

    def __post_init__(self) -> None:
        if (self.evicts == LEAST) != (self.score is not None):
            raise InferenceError(
                f"kernel rule with evicts={self.evicts!r} and score={self.score!r}: "
                f"give a score with evicts={LEAST!r}, and only there"
            )
        if self.score == RETENTION and (self.together or self.reduce != "mean"):
            raise InferenceError(
                f"kernel rule with score={RETENTION!r}: every KV head has its own number; leave "
                "together and reduce out"
            )
        if self.interval is not None and self.evicts != NEVER:
            raise InferenceError(
                f"kernel rule with interval={self.interval} and evicts={self.evicts!r}: "
                f"an interval needs evicts={NEVER!r}"
            )


@dataclass(frozen=True, kw_only=True)
class PageRule:
    """Evict nothing; each query head reads the pages with the highest bound on its attention.

    The hook `pages` states their number. Prompts read everything.

    Attributes:
        page: Tokens of a page, a multiple of the slots of a page of the cache.
        dense_layers: Number of first layers that read everything.
        last: Whether the page of the newest token is always read.
    """

    page: int
    dense_layers: int = 0
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class LayeredRule:
    """Evict every token that leaves the window of a layer; follow a rule in the other layers.

    Attributes:
        rule: Rule of the layers without a window.
        windows: Tokens that a query reads in each layer, its own included; None for all. The same
            number in all layers that have one.
    """

    rule: WindowRule
    windows: tuple[int | None, ...]


KernelRule: TypeAlias = WindowRule | MergeRule | BudgetRule | PageRule | LayeredRule
