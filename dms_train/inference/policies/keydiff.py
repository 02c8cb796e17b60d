"""KeyDiff: keys unlike the mean key stay (Park et al., 2025, arXiv:2504.15364).

Evicts at the end of a prompt, as KeyDiffPress of kvpress 0.5.5 does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.scored import PromptEndPolicy


class KeyDiffPolicy(PromptEndPolicy):
    """The score is minus the cosine of a key and the mean of the normalised keys."""

    def __init__(self, options: BudgetOptions) -> None:
        self._options = options

    def scores(self, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Minus the cosines."""
        assert slots.key is not None
        key = slots.key.to(torch.promote_types(slots.key.dtype, torch.float32))
        held = (slots.position >= 0)[..., None]
        anchor = (F.normalize(key, dim=-1) * held).sum(2, keepdim=True) / held.sum(2, keepdim=True)
        return -F.cosine_similarity(key, anchor, dim=-1), self._options.tokens(sequences)


POLICY = PolicyKind(BudgetOptions, lambda options, spec: KeyDiffPolicy(options))
