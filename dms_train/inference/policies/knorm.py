"""Knorm: keys of the smallest norm stay (Devoto et al., 2024, arXiv:2406.11430).

Evicts at the end of a prompt, as KnormPress of kvpress 0.5.5 does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.scored import PromptEndPolicy


class KnormPolicy(PromptEndPolicy):
    """The score is minus the norm of the key."""

    def __init__(self, options: BudgetOptions) -> None:
        self._options = options

    def scores(self, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Minus the norms of the keys, which RoPE does not change."""
        assert slots.key is not None
        key = slots.key.to(torch.promote_types(slots.key.dtype, torch.float32))
        return -key.norm(dim=-1), self._options.tokens(sequences)


POLICY = PolicyKind(BudgetOptions, lambda options, spec: KnormPolicy(options))
