"""Eviction decisions from the eviction channel of the query.

Shape letters: s positions, b samples, g KV heads, r query heads per KV head, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.method.base import MethodSpec


def eviction_channel(query: Tensor, channel: int) -> Tensor:
    """Return the eviction channel [s, b, g] of query [s, b, g, r, d] before RoPE."""
    return query[..., 0, channel]


def scale_eviction_channel(query: Tensor, channel: int, factor: float) -> Tensor:
    """Return a copy of query [s, b, g, r, d] with its eviction channel multiplied by `factor`."""
    r, d = query.shape[-2:]
    mask = torch.ones(r, d, device=query.device, dtype=query.dtype)
    mask[0, channel].fill_(factor)  # an assignment would copy the number from the host
    return query * mask


def eviction_logits(eviction_channel: Tensor, spec: MethodSpec) -> Tensor:
    """Compute x = scale * eviction channel - offset, in float32 (float64 stays)."""
    eviction_channel = (
        eviction_channel if eviction_channel.dtype == torch.float64 else eviction_channel.float()
    )
    return spec.alpha_scale * eviction_channel - spec.alpha_offset


def relax(logits: Tensor, noise: Tensor | None, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Relax the decisions (paper equation 1).

    Args:
        logits: x, any shape.
        noise: Logistic noise of the same shape, or None.
        tau: Temperature.

    Returns:
        With z = (x + noise) / tau: alpha = sigmoid(z), log(1 - alpha) = logsigmoid(-z), and the
        straight-through variant of alpha. That variant is hard 0/1 forward and has the soft
        gradient.
    """
    z = (logits if noise is None else logits + noise) / tau
    alpha = torch.sigmoid(z)
    straight_through = (z > 0).to(alpha.dtype) + (alpha - alpha.detach())
    return alpha, F.logsigmoid(-z), straight_through


def hard_decisions(logits: Tensor) -> Tensor:
    """Apply the inference rule: evict if and only if x > 0. Returns bool."""
    return logits > 0
