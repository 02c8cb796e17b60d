"""H2O: heavy hitters and recent tokens (Zhang et al., 2023, arXiv:2306.14048; commit ac75c2a).

The score of a token is the attention that it has received since it entered the cache, summed over
the queries. Half of the budget is for the newest tokens, half for the highest scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.attention_scores import reduced
from dms_train.inference.policies.base import AttentionReceived, PolicyKind, Sequences, Slots
from dms_train.inference.policies.every_step import EveryStepOptions, EveryStepPolicy
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.inference.policies.kernel_rules import (
    COLUMN_SUMS,
    LEAST,
    BudgetRule,
    KernelRule,
    Limits,
)
from dms_train.limits import OneOf


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OOptions(EveryStepOptions):
    """Options of `h2o`.

    Attributes:
        group_reduce: How the query heads of a KV head make one score.
    """

    group_reduce: Annotated[str, OneOf("mean", "max", "sum")] = "mean"


class H2OPolicy(EveryStepPolicy):
    """H2O; the state of a slot is the attention received so far."""

    state_width = 1

    def __init__(self, options: H2OOptions) -> None:
        super().__init__(options)
        self._reduce = options.group_reduce

    def kernel_rule(self) -> KernelRule | str:
        """Evict the token with the lowest sum of attention received."""
        return BudgetRule(
            evicts=LEAST, score=COLUMN_SUMS, reduce=self._reduce, streams=self.streams
        )

    def limits(self, sequences: Sequences) -> Limits:
        """Return the budget and its half for the newest tokens."""
        budget = self.budget(sequences)
        return Limits(budget, budget - budget // 2)

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Add the attention of the pass."""
        total = reduced(received.total, self._reduce)
        return slots.state + total[..., None].to(slots.state)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens with the lowest scores, except recent ones."""
        assert slots.sequences is not None
        budget, count = self.limits(slots.sequences)
        recent = newest(slots.position, slots.sequences.end, count)
        score = slots.state[..., 0].masked_fill(recent, torch.inf)
        return beyond_budget(score, slots.position, budget)[:, :, None]


POLICY = PolicyKind(H2OOptions, lambda options, spec: H2OPolicy(options))
