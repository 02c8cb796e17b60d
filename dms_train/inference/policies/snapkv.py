"""SnapKV: keep prompt tokens that the last queries attend (Li et al., 2024, arXiv:2404.14469).

The policy evicts at the end of a prompt. A token's score is its mean attention from the last
`window` queries and the query heads of a KV head, smoothed over neighbouring positions. The window
itself and the highest scores stay. The paper does not fix the kind of pooling (A-SNAP1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from dms_train.inference.policies.attention_scores import AVERAGE, MAXIMUM, pooled, reduced
from dms_train.inference.policies.base import PolicyKind
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy
from dms_train.limits import AtLeast, Below, OneOf


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKVOptions(ScoreOptions):
    """Options of `snapkv`, with the defaults of the Hard-KV paper.

    Attributes:
        window: Number of last queries, which score the prompt; their tokens stay and count against
            the budget.
        kernel: Number of neighbouring positions in the smoothing, odd.
        pool: `avg` or `max`.
        group_reduce: How the query heads of a KV head make one score, before the smoothing.
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 32
    kernel: Annotated[int, AtLeast(1)] = 7
    pool: Annotated[str, OneOf(AVERAGE, MAXIMUM)] = MAXIMUM
    group_reduce: Annotated[str, OneOf("mean", "max", "sum")] = "mean"

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, and one for an even kernel."""
        yield from ScoreOptions.check(self, path)
        if self.kernel % 2 == 0:
            yield f"kernel={self.kernel}: use an odd number"


class SnapKVPolicy(ScorePolicy):
    """Keep the window and the highest scores before it."""

    options: SnapKVOptions

    def __init__(self, options: SnapKVOptions) -> None:
        super().__init__(options)
        self.recent_queries = self.protected = options.window

    def score(self, keys: Tensor, values: Tensor, attention: Tensor | None) -> Tensor:
        """Return the smoothed attention of the window to the tokens before it."""
        assert attention is not None
        score = reduced(attention, self.options.group_reduce)
        score[..., max(0, score.shape[-1] - self.protected) :] = 0
        return pooled(score, self.options.kernel, self.options.pool)


POLICY = PolicyKind(SnapKVOptions, lambda options, spec: SnapKVPolicy(options))
