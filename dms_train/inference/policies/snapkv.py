"""SnapKV: prompt tokens that its last queries attend (Li et al., 2024, arXiv:2404.14469).

At the end of a prompt, the attention of the last `window` queries is averaged over them and over
the query heads of a KV head, smoothed over neighbouring positions, and the budget goes to the
highest scores and to the window itself. The paper does not fix the kind of pooling (A-SNAP1).
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
    """Options of `snapkv`; the defaults are those of the Hard-KV paper.

    Attributes:
        window: Last queries that score the prompt; their tokens stay and count against the budget.
        kernel: Neighbouring positions of the smoothing, an odd number.
        pool: `avg` or `max`.
        group_reduce: How the query heads of a KV head make one score, before the smoothing.
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 32
    kernel: Annotated[int, AtLeast(1)] = 7
    pool: Annotated[str, OneOf(AVERAGE, MAXIMUM)] = MAXIMUM
    group_reduce: Annotated[str, OneOf("mean", "max", "sum")] = "mean"

    def check(self, path: str) -> Iterator[str]:
        """Yield a line for an even kernel, besides those of the budget."""
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
