"""SplitMix64, a counter-based generator in wrapping int64 arithmetic.

A draw depends on its keys alone. CPU and GPU, and every order of computation, therefore see the
same numbers, and there is no generator state to keep.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = TypeVar("Numbers", Tensor, NDArray[np.int64])  # numpy is faster for few numbers

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_DOUBLE_BITS = 52  # so that (bits + 0.5) / 2**52 is exact in float64 and never 0 or 1


def shift_right(x: Numbers, bits: int) -> Numbers:
    """Shift int64 right logically, because `>>` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def steps(like: Tensor, value: int | Tensor) -> Tensor:
    """Return the offset of `value` steps in the shape of `like`; int64 wraps in a tensor only.

    A `value` on the device, int64 [], can change between replays of a CUDA graph.
    """
    if isinstance(value, Tensor):
        return (value * GOLDEN).expand_as(like)
    signed = (value + 2**63) % 2**64 - 2**63  # a seed may be any integer
    return torch.full_like(like, signed) * GOLDEN


def mix(x: Numbers) -> Numbers:
    """Apply the finalizer of SplitMix64, int64 to int64."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Draw numbers between 0 and 1, both excluded.

    Args:
        keys: int64 [b], one stream each.
        count: Number of draws per stream.

    Returns:
        float64 [b, count] on the device of `keys`.
    """
    stream_steps = torch.arange(1, count + 1, device=keys.device) * GOLDEN
    bits = shift_right(mix(keys[:, None] + stream_steps), 64 - _DOUBLE_BITS)
    return (bits.double() + 0.5) * 2.0**-_DOUBLE_BITS
