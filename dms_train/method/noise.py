"""Relaxation noise keyed by (seed, step, sample, layer, KV head, position), never by rank.

Every rank draws exactly the slice that it needs. Every parallel layout, every recomputation, CPU
and GPU see the same noise, and resuming needs no generator state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.method.splitmix import GOLDEN, mix, shift_right, steps

UNIFORM_BITS = 23  # so that (bits + 0.5) / 2**23 is exact in float32 and never 0 or 1


class LayerNoise(NamedTuple):
    """Key of the noise of a layer: int64 keys [b], layer number, first KV head of this rank."""

    keys: Tensor
    layer: int
    first_head: int

    def logistic(self, length: int, heads: int) -> Tensor:
        """Draw `logistic_noise` for `heads` KV heads of this rank, float32 [length, b, heads]."""
        return logistic_noise(self.keys, self.layer, length, heads, self.first_head)


def sample_keys(seed: int, step: int | Tensor, samples: Tensor) -> Tensor:
    """Compute one key per sample.

    Args:
        seed: Seed of the run.
        step: Global optimizer step, or int64 [] on the device of `samples`.
        samples: Global sample numbers, int64 [b].

    Returns:
        int64 [b].
    """
    key = mix(steps(samples, seed) + 1)
    key = mix(key + steps(samples, step))
    return mix(key + samples * GOLDEN)


def logistic_noise(keys: Tensor, layer: int, length: int, heads: int, first_head: int) -> Tensor:
    """Draw the difference of two Gumbel variables, which is a logistic variable.

    Args:
        keys: int64 [b] from `sample_keys`.
        layer: Global layer number.
        length: Number of positions T, starting at 0.
        heads: KV heads to draw for.
        first_head: Global number of the first of them.

    Returns:
        float32 [T, b, heads] on the device of `keys`.
    """
    stream = mix(keys + steps(keys, layer))  # [b]
    head = torch.arange(first_head, first_head + heads, device=keys.device)
    stream = mix(stream[:, None] + (head + 1)[None, :] * GOLDEN)  # [b, heads]
    position = torch.arange(1, length + 1, device=keys.device) * GOLDEN
    bits = shift_right(mix(stream[None] + position[:, None, None]), 64 - UNIFORM_BITS)
    uniform = (bits.float() + 0.5) * 2.0**-UNIFORM_BITS
    return torch.log(uniform) - torch.log1p(-uniform)
