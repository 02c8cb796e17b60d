"""Clamped gate of gpt-oss in torch operations.

Only its input is saved, as for the gates of `triton_gate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dms_train.families.base import GATE_ALPHA, GATE_LIMIT


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = _clamped(x)
        return (up + 1) * gate * (GATE_ALPHA * gate).sigmoid()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x)
        share = (GATE_ALPHA * gate).sigmoid()
        scaled = d_out * share
        # in place, because an expert may have most of the tokens
        d_gate = up.add_(1).mul_(scaled).mul_(1 + GATE_ALPHA * gate * (1 - share))
        d_up = scaled.mul_(gate)
        raw_gate, raw_up = x.chunk(2, -1)
        d_gate.masked_fill_(raw_gate > GATE_LIMIT, 0)
        d_up.masked_fill_(raw_up.abs() > GATE_LIMIT, 0)
        return torch.cat([d_gate, d_up], -1)


def _clamped(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates and ups of x [..., 2 f] within their limits."""
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)


def clamped_swiglu(x: Tensor) -> Tensor:
    """Return (up + 1) gate sigmoid(alpha gate) for x [..., 2 f], gates before ups.

    The gate is at most the limit of `families.base`, and up within the limit of 0.
    """
    return _ClampedSwiGLU.apply(x)
