"""H2O: heavy hitters and recent tokens (Zhang et al., 2023, arXiv:2306.14048; commit ac75c2a).

The score of a token is the attention that it has received since it entered the cache, summed over
the queries. Half of the budget is for the newest tokens, half for the highest scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import PolicyKind, Received, Slots
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.inference.policies.scored import ScoredOptions, ScoredPolicy, reduced
from dms_train.limits import OneOf


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OOptions(ScoredOptions):
    """Options of `h2o`.

    Attributes:
        group_reduce: How the query heads of a KV head make one score.
    """

    group_reduce: Annotated[str, OneOf("mean", "max", "sum")] = "mean"


class H2OPolicy(ScoredPolicy):
    """State: the attention received so far."""

    state_width = 1

    def __init__(self, options: H2OOptions) -> None:
        super().__init__(options)
        self._reduce = options.group_reduce

    def observe(self, slots: Slots, received: Received) -> Tensor:
        """Add what the pass gave."""
        total = reduced(received.total, self._reduce)
        return slots.state + total[..., None].to(slots.state)

    def expired(self, slots: Slots, at: Tensor) -> Tensor:
        """The least of the tokens that are not recent."""
        assert slots.sequences is not None
        budget = self.budget(slots.sequences)
        recent = newest(slots.position, slots.sequences.end, budget - budget // 2)
        score = slots.state[..., 0].masked_fill(recent, torch.inf)
        return beyond_budget(score, slots.position, budget)[:, :, None]


POLICY = PolicyKind(H2OOptions, lambda options, spec: H2OPolicy(options))
