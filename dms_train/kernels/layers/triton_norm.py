"""Residual addition and RMSNorm of many tokens in one pass over memory.

Shape letters: t tokens, c channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS_PER_WARP = 512


@triton.jit
def _add_norm_kernel(
    residual_ptr, update_ptr, weight_ptr, sum_ptr, out_ptr, width, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    """Add and normalise one token."""
    row = tl.program_id(0).to(tl.int64) * width
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    residual = tl.load(residual_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
    total = (residual + update).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + channel, total, mask=inside)
    wide = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    out = wide * factor * weight
    tl.store(out_ptr + row + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    residual: Tensor, update: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add and normalise in one kernel; see `LayerKernels.add_norm`."""
    t, c = residual.shape
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(c)
    warps = min(16, max(1, block // _CHANNELS_PER_WARP))
    _add_norm_kernel[(t,)](
        residual, update, weight, total, out, c, epsilon, BLOCK=block, num_warps=warps
    )
    return total, out
