"""PyramidKV: SnapKV with budgets that fall with depth (Cai et al., 2024, arXiv:2406.02069).

The rule follows KVCache-Factory at c97f9d7, which adds the window to a layer's budget (A-PYR1). The
mean over the layers is the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.attention_scores import AVERAGE, MAXIMUM
from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.snapkv import SnapKVOptions, SnapKVPolicy
from dms_train.limits import AtLeast, Below, OneOf


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKVOptions(SnapKVOptions):
    """Options of `pyramidkv`.

    Attributes:
        beta: Divisor of the budget without the window for the smallest layer.
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 64
    kernel: Annotated[int, AtLeast(1)] = 5
    pool: Annotated[str, OneOf(AVERAGE, MAXIMUM)] = AVERAGE
    beta: Annotated[int, AtLeast(1)] = 20


class PyramidKVPolicy(SnapKVPolicy):
    """Keep fewer tokens in each following layer."""

    options: PyramidKVOptions

    def kept(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return the layer's budget and the window, int64 [b]."""
        return layer_budget(
            super().kept(slots, sequences),
            sequences.end,
            window=self.protected,
            beta=self.options.beta,
            layer=slots.layer,
            layers=sequences.layers,
        )


def layer_budget(
    budget: Tensor, tokens: Tensor, *, window: int, beta: int, layer: int, layers: int
) -> Tensor:
    """Return the number of tokens that a layer keeps, its window included, int64 [b].

    Args:
        budget: int64 [b], mean over the layers.
        tokens: int64 [b], lengths of the prompts.
        window: Number of newest tokens that stay.
        beta: As in the options.
        layer: Number of the layer.
        layers: Number of layers.
    """
    spare = (budget - window).clamp(min=0)
    least = spare // beta
    most = 2 * spare - least
    capped = most >= tokens - window
    most = torch.where(capped, tokens - window, most)
    least = torch.where(capped, 2 * spare - most, least)
    step = (most - least) // max(1, layers - 1)
    kept = most - layer * step + window
    plain = (tokens < 2 * spare) | (budget <= window)
    return torch.where(plain, budget, kept)


POLICY = PolicyKind(PyramidKVOptions, lambda options, spec: PyramidKVPolicy(options))
