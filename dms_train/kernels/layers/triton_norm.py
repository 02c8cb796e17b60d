"""RMSNorm of the residual stream, with or without an addition before it, in one pass each way.

The backward pass also adds the gradient of the residual stream itself, so that autograd does not.

Shape letters: t tokens, c channels, p programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHANNELS_PER_WARP = 512
_SMALLEST_TILE = 1024  # elements; narrow norms, such as those of heads, take several tokens
_WARPS_PER_PROCESSOR = 24  # of the backward pass, whose programs stay until the end
_PROGRAMS_WITHOUT_GPU = 2


@triton.jit
def rms_norm_forward(
    x_ptr, update_ptr, weight_ptr, sum_ptr, out_ptr, factor_ptr, tokens, width, epsilon,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS tokens, after adding an update where ADD."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (channel < width)[None, :]
    at = token.to(tl.int64)[:, None] * width + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        update = tl.load(update_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = (x + update).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    tl.store(factor_ptr + token, factor, mask=token < tokens)
    weight = tl.load(weight_ptr + channel, mask=channel < width, other=0.0).to(tl.float32)
    out = x * factor[:, None] * weight[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    x_ptr, d_out_ptr, d_sum_ptr, weight_ptr, factor_ptr, d_x_ptr, d_weight_ptr, tokens, width,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute d_x of every p-th tile of tokens, and this program's share of d_weight [p, c].

    Where ADD, d_x includes d_sum, the gradient of the sum that was normalised.
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    known = channel < width
    weight = tl.load(weight_ptr + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(program * ROWS, tokens, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & known[None, :]
        at = token.to(tl.int64)[:, None] * width + channel[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d_out = tl.load(d_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + token, mask=token < tokens, other=0.0)[:, None]
        normed = x * factor
        d_weight += d_out * normed
        d_normed = d_out * weight
        share = tl.sum(d_normed * normed, 1) / width
        d_x = (d_normed - normed * share[:, None]) * factor
        if ADD:
            d_x += tl.load(d_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
    tl.store(d_weight_ptr + program * width + channel, tl.sum(d_weight, 0), mask=known)


def _tile(width: int) -> dict[str, int]:
    """Return sizes of a tile of tokens and the warps that share it."""
    block = triton.next_power_of_2(width)
    rows = max(1, _SMALLEST_TILE // block)
    return {
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": min(16, max(1, rows * block // _CHANNELS_PER_WARP)),
    }


def _programs(device: torch.device, warps: int) -> int:
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    properties = torch.cuda.get_device_properties(device)
    return _WARPS_PER_PROCESSOR // warps * properties.multi_processor_count


class _AddNorm(torch.autograd.Function):
    """Sum of x and update [..., c], or x itself without an update, and the norm of the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x, width = x.contiguous(), x.shape[-1]
        tokens, tile = x.numel() // width, _tile(width)
        out, factor = torch.empty_like(x), x.new_empty(tokens, dtype=torch.float32)
        total = x if update is None else torch.empty_like(x)
        rms_norm_forward[(triton.cdiv(tokens, tile["ROWS"]),)](
            x, None if update is None else update.contiguous(), weight, total, out, factor,
            tokens, width, epsilon, ADD=update is not None, **tile,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, factor)
        ctx.adds = update is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(ctx: Any, d_total: Tensor | None, d_out: Tensor | None) -> Any:
        x, weight, factor = ctx.saved_tensors
        if d_out is None:
            return d_total, d_total if ctx.adds else None, None, None
        tile = _tile(len(weight))
        d_x, programs = torch.empty_like(x), _programs(x.device, tile["num_warps"])
        d_weight = factor.new_empty(programs, len(weight))
        rms_norm_backward[(programs,)](
            x, d_out.contiguous(), None if d_total is None else d_total.contiguous(), weight,
            factor, d_x, d_weight, len(factor), len(weight), ADD=d_total is not None,
            **tile,
        )  # fmt: skip
        return d_x, d_x if ctx.adds else None, d_weight.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean of x^2 + epsilon) * weight for x [..., c], computed in float32."""
    return _AddNorm.apply(x, None, weight, epsilon)[1]


def add_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add and normalise in one kernel; see `LayerKernels.add_norm`."""
    return _AddNorm.apply(residual, update, weight, epsilon)
