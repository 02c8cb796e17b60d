"""Gated activations: SwiGLU and GeGLU, in one pass over memory each way.

Only their input is saved. Both are gate * sigmoid(inner) * up. SwiGLU has inner = gate. GeGLU with
the tanh approximation has inner = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), because
(1 + tanh(x / 2)) / 2 = sigmoid(x).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024
_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def gate_forward(x_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + 2 * row * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (2 * row + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = _FACTOR * gate * (1 + _CUBE * gate * gate)
    out = gate * tl.sigmoid(inner) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(x_ptr, d_out_ptr, d_x_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradients of BLOCK gates and BLOCK factors of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, second = 2 * row * width + column, (2 * row + 1) * width + column
    gate = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + second, mask=inside, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    inner, slope = gate, 1.0
    if GELU:
        inner = _FACTOR * gate * (1 + _CUBE * gate * gate)
        slope = _FACTOR * (1 + 3 * _CUBE * gate * gate)
    share = tl.sigmoid(inner)
    d_gate = d_out * up * share * (1 + gate * (1 - share) * slope)
    d_up = d_out * gate * share
    tl.store(d_x_ptr + first, d_gate.to(d_x_ptr.dtype.element_ty), mask=inside)
    tl.store(d_x_ptr + second, d_up.to(d_x_ptr.dtype.element_ty), mask=inside)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, _BLOCK)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gelu: bool) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        grid = _grid(out.numel() // width, width)
        gate_forward[grid](x, out, width, GELU=gelu, BLOCK=_BLOCK)
        ctx.save_for_backward(x)
        ctx.gelu = gelu
        return out

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        d_x, width = torch.empty_like(x), d_out.shape[-1]
        grid = _grid(d_out.numel() // width, width)
        gate_backward[grid](x, d_out.contiguous(), d_x, width, GELU=ctx.gelu, BLOCK=_BLOCK)
        return d_x, None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(x[..., :f]) * x[..., f:] for x [..., 2 f], computed in float32."""
    return _Gated.apply(x, False)


def geglu(x: Tensor) -> Tensor:
    """Return gelu(x[..., :f]) * x[..., f:], with the tanh approximation, as `swiglu`."""
    return _Gated.apply(x, True)
