"""Relaxation noise keyed by (seed, step, sample, layer, KV head, position), never by rank.

A counter-based generator (SplitMix64 in wrapping int64 arithmetic): a rank draws
exactly the slice it needs. Every parallel layout, every recomputation, CPU and GPU see the same
noise, and resuming needs no generator state.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
UNIFORM_BITS = 23  # so that (bits + 0.5) / 2**23 is exact in float32 and never 0 or 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _counter(like: Tensor, value: int) -> Tensor:
    """`value` steps along the stream; multiplied as a tensor, where int64 wraps."""
    signed = (value + 2**63) % 2**64 - 2**63  # a seed may be any integer
    return torch.full_like(like, signed) * GOLDEN


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """One key per sample. samples: int64 [b], global sample numbers. Returns int64 [b]."""
    key = _mix(_counter(samples, seed) + 1)
    key = _mix(key + _counter(samples, step))
    return _mix(key + samples * GOLDEN)


def logistic_noise(keys: Tensor, layer: int, length: int, heads: int, first_head: int) -> Tensor:
    """Difference of two Gumbel draws, i.e. a logistic variable.

    Args:
        keys: int64 [b] from `sample_keys`.
        layer: Global layer number.
        length: Number of positions T, starting at 0.
        heads: KV heads to draw for.
        first_head: Global number of the first of them.

    Returns:
        float32 [T, b, heads] on the device of `keys`.
    """
    stream = _mix(keys + _counter(keys, layer))  # [b]
    head = torch.arange(first_head, first_head + heads, device=keys.device)
    stream = _mix(stream[:, None] + (head + 1)[None, :] * GOLDEN)  # [b, heads]
    position = torch.arange(1, length + 1, device=keys.device) * GOLDEN
    bits = _shift_right(_mix(stream[None] + position[:, None, None]), 64 - UNIFORM_BITS)
    uniform = (bits.float() + 0.5) * 2.0**-UNIFORM_BITS
    return torch.log(uniform) - torch.log1p(-uniform)
