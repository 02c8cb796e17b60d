"""Frequencies of RoPE with YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dms_train.hf.rope import RopeScaling


def yarn_frequencies(frequency: Tensor, base: float, rule: RopeScaling) -> Tensor:
    """Scale frequencies as YaRN does (arXiv:2309.00071, section 3.2).

    Args:
        frequency: Frequencies of plain RoPE in radians per position, [channels / 2].
        base: Their base.
        rule: Rule of type `yarn`.

    Returns:
        Frequencies: whole ones of pairs that turn often within the original length, divided ones of
        pairs that turn rarely, and mixed ones between them.
    """
    length, pairs = rule.original_max_position_embeddings, len(frequency)

    def pair(turns: float) -> float:
        """Return the pair, counted from 0, that turns this often within the original length."""
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair(rule.beta_fast), pair(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=frequency.device)
    divided = ((number - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency * (1 - divided) + frequency / rule.factor * divided
