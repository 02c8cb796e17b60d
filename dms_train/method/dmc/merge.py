"""Partial accumulation: every token's slot as it is when the token arrives (section 3.2).

    z_i = z_{i-1} alpha_i + omega_i
    k_i <- (alpha_i k_{i-1} z_{i-1} + omega_i k_i) / z_i, and values likewise

A slot is an average of its last `width` tokens only, so that every token is computed on its own:

    w_im = omega_{i-m} alpha_i alpha_{i-1} ... alpha_{i-m+1}, m < width
    k_i <- sum_m w_im k_{i-m} / sum_m w_im
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(
    key: Tensor, value: Tensor, alpha: Tensor, weight: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Merge keys and values with the keys and values of earlier tokens; reference implementation.

    Args:
        key: [s, ..., d], before RoPE.
        value: [s, ..., d].
        alpha: [s, ...], degree to which a token continues the slot of its predecessor, 0 to 1.
        weight: [s, ...], positive importance omega; 0 for padding.
        width: Number of tokens that a slot averages.

    Returns:
        Both in their own dtype; sums are at least float32.
    """
    wide = torch.promote_types(alpha.dtype, torch.float32)
    share, wide_weight = alpha.new_ones(alpha.shape, dtype=wide), weight.to(wide)
    k, v = key.to(wide), value.to(wide)
    keys, values, weight_sum = k * wide_weight[..., None], v * wide_weight[..., None], wide_weight
    for m in range(1, min(width, len(key))):
        # for tokens m and later: product of the token's alpha and the m - 1 alphas before it
        share = share[1:] * alpha.to(wide)[1 : len(alpha) - m + 1]
        weighted_share = (share * wide_weight[:-m])[..., None]
        keys = torch.cat([keys[:m], keys[m:] + weighted_share * k[:-m]])
        values = torch.cat([values[:m], values[m:] + weighted_share * v[:-m]])
        weight_sum = torch.cat([weight_sum[:m], weight_sum[m:] + weighted_share[..., 0]])
    weight_sum = weight_sum.clamp(min=torch.finfo(wide).tiny)[..., None]
    return (keys / weight_sum).to(key.dtype), (values / weight_sum).to(value.dtype)
