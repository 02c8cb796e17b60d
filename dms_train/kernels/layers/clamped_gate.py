"""Clamped gate of gpt-oss in torch operations."""

from __future__ import annotations

from torch import Tensor

from dms_train.families.base import GATE_ALPHA, GATE_LIMIT


def clamped_swiglu(x: Tensor) -> Tensor:
    """Return (up + 1) gate sigmoid(alpha gate) for x [..., 2 f], gates before ups.

    The gate is at most the limit of `families.base`, and up within the limit of 0.
    """
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * gate * (GATE_ALPHA * gate).sigmoid()
