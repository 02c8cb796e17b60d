"""RoCo: evict the least attended token of steady attention (Ren and Zhu, 2024, arXiv:2402.06262).

A token's score is the mean attention that it has received since it entered the cache. The newest
tokens stay. The tokens with the most varying attention stay too, regardless of their score. The D2O
paper only names the method; sizes are choices of this project (A-ROCO1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import AttentionReceived, PolicyKind, Sequences, Slots
from dms_train.inference.policies.every_step import EveryStepOptions, EveryStepPolicy
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.limits import AtLeast, Below


@dataclass(frozen=True, slots=True, kw_only=True)
class RoCoOptions(EveryStepOptions):
    """Options of `roco`.

    Attributes:
        recent: Number of newest tokens that stay; None for a quarter of the budget, rounded down.
        varied: Number of tokens that stay because of the largest standard deviation; None for half
            of the budget. Both count against the budget; the newest tokens have priority.
    """

    recent: Annotated[int | None, AtLeast(0), Below(2**31)] = None
    varied: Annotated[int | None, AtLeast(0), Below(2**31)] = None


class RoCoPolicy(EveryStepPolicy):
    """RoCo; the state is the attention received so far, and the sum of its squares.

    Both are sums over the queries and over the query heads of a KV head.
    """

    state_width = 2

    def __init__(self, options: RoCoOptions) -> None:
        super().__init__(options)
        self._recent, self._varied = options.recent, options.varied

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Add the attention of the pass."""
        heads = received.total.shape[2]
        new = torch.stack([received.total.sum(2), received.squares.sum(2)], -1) / heads
        return slots.state + new.to(slots.state)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens with the lowest mean, except recent and varied ones."""
        sequences = slots.sequences
        assert sequences is not None
        budget = self.budget(sequences)
        recent, varied = self._protected(budget)
        mean, deviation = self._statistics(slots, sequences)
        last = newest(slots.position, sequences.end, recent)
        outside = deviation.masked_fill(last, torch.inf)
        stays = ~beyond_budget(outside, slots.position, recent + varied)
        score = mean.masked_fill(stays, torch.inf)
        return beyond_budget(score, slots.position, budget)[:, :, None]

    def _protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of tokens that stay as new, and as varied, int64 [b] each."""
        recent = budget // 4 if self._recent is None else budget.clamp(max=self._recent)
        varied = budget // 2 if self._varied is None else budget.new_tensor(self._varied)
        return recent, torch.minimum(varied, budget - recent)

    def _statistics(self, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the attention of each token, [b, h, s]."""
        queries = (sequences.end[:, None, None] - slots.position).clamp(min=1)
        mean, square = (slots.state / queries[..., None]).unbind(-1)
        return mean, (square - mean * mean).clamp(min=0).sqrt()


POLICY = PolicyKind(RoCoOptions, lambda options, spec: RoCoPolicy(options))
