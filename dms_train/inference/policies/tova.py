"""TOVA: evict the token that the newest query attends least (Oren et al., 2024, arXiv:2401.06104).

With `scope=layer`, as in the authors' code at 9c7d09b, the score is the mean over all query heads
of a layer. All KV heads then evict the same positions. With `scope=group`, the score is the mean
over the query heads of each KV head. The DMS paper does not say which it uses (A-TOVA1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import AttentionReceived, PolicyKind, Sequences, Slots
from dms_train.inference.policies.every_step import EveryStepOptions, EveryStepPolicy
from dms_train.inference.policies.eviction import beyond_budget, newest
from dms_train.inference.policies.kernel_rules import (
    LEAST,
    NEWEST_WEIGHTS,
    BudgetRule,
    KernelRule,
    Limits,
)
from dms_train.limits import OneOf

LAYER, GROUP = "layer", "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVAOptions(EveryStepOptions):
    """Options of `tova`.

    Attributes:
        scope: Query heads over which the score is averaged.
        protect_last: Keep the newest token regardless of its score.
    """

    scope: Annotated[str, OneOf(LAYER, GROUP)] = LAYER
    protect_last: bool = False


class TOVAPolicy(EveryStepPolicy):
    """TOVA; the state of a slot is the attention of the newest query."""

    state_width = 1

    def __init__(self, options: TOVAOptions) -> None:
        super().__init__(options)
        self._scope, self._protected = options.scope, int(options.protect_last)

    def kernel_rule(self) -> KernelRule | str:
        """Evict the token that the newest query attends least."""
        together = self._scope == LAYER
        return BudgetRule(
            evicts=LEAST, score=NEWEST_WEIGHTS, together=together, streams=self.streams
        )

    def limits(self, sequences: Sequences) -> Limits:
        """Return the budget, and 1 protected token if the newest one always stays."""
        budget = self.budget(sequences)
        return Limits(budget, torch.full_like(budget, self._protected))

    def observe(self, slots: Slots, received: AttentionReceived) -> Tensor:
        """Replace the scores by the attention of the newest query."""
        score = received.newest.mean(2)
        if self._scope == LAYER:
            score = self._by_position(slots.position, score)
        return score[..., None].to(slots.state)

    def _by_position(self, position: Tensor, score: Tensor) -> Tensor:
        """Average scores [b, h, s] of a position, which all KV heads hold, over the heads."""
        b, h, s = position.shape
        order = position.masked_fill(position < 0, torch.iinfo(torch.int64).max).argsort(-1)
        mean = score.gather(-1, order).mean(1, keepdim=True).expand(b, h, s)
        return torch.empty_like(score).scatter_(-1, order, mean)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the least attended tokens."""
        assert slots.sequences is not None
        budget, protected = self.limits(slots.sequences)
        last = newest(slots.position, slots.sequences.end, protected)
        score = slots.state[..., 0].masked_fill(last, torch.inf)
        return beyond_budget(score, slots.position, budget)[:, :, None]


POLICY = PolicyKind(TOVAOptions, lambda options, spec: TOVAPolicy(options))
