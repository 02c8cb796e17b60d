"""DMC's merge in one pass over keys and values, forward and backward.

The weights of every token's average, [rows, s, width], are made by torch, which also makes their
gradients: they are small. The kernels add the tokens:

    out_i = sum_m p_im x_{i-m}          dx_j = sum_m p_{j+m,m} dout_{j+m}
    dp_im = dout_i . x_{i-m}
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 32  # of a program


@triton.jit
def band_forward(
    x_ptr, p_ptr, out_ptr, s, d, WIDTH: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """Averages of N tokens of one row."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    c = tl.arange(0, D)
    total = tl.zeros((N, D), tl.float32)
    for m in range(WIDTH):
        j = i - m
        inside = (j >= 0) & (i < s)
        at = (row * s + j)[:, None] * d + c[None, :]
        x = tl.load(x_ptr + at, mask=inside[:, None] & (c < d)[None, :], other=0.0)
        p = tl.load(p_ptr + (row * s + i) * WIDTH + m, mask=inside, other=0.0)
        total += p[:, None] * x.to(tl.float32)
    at = (row * s + i)[:, None] * d + c[None, :]
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=(i < s)[:, None] & (c < d)[None, :])


@triton.jit
def band_backward(
    x_ptr, p_ptr, d_out_ptr, d_x_ptr, d_p_ptr, s, d,
    WIDTH: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients of N tokens of one row, and of the weights of their averages."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    c = tl.arange(0, D)
    columns = (c < d)[None, :]
    own = (row * s + i)[:, None] * d + c[None, :]
    d_own = tl.load(d_out_ptr + own, mask=(i < s)[:, None] & columns, other=0.0).to(tl.float32)
    d_x = tl.zeros((N, D), tl.float32)
    for m in range(WIDTH):
        later = i + m
        inside = later < s
        at = (row * s + later)[:, None] * d + c[None, :]
        d_out = tl.load(d_out_ptr + at, mask=inside[:, None] & columns, other=0.0).to(tl.float32)
        p = tl.load(p_ptr + (row * s + later) * WIDTH + m, mask=inside, other=0.0)
        d_x += p[:, None] * d_out
        before = i - m
        there = (before >= 0) & (i < s)
        at = (row * s + before)[:, None] * d + c[None, :]
        x = tl.load(x_ptr + at, mask=there[:, None] & columns, other=0.0).to(tl.float32)
        d_p = tl.sum(d_own * x, 1)
        tl.store(d_p_ptr + (row * s + i) * WIDTH + m, d_p, mask=i < s)
    tl.store(d_x_ptr + own, d_x.to(d_x_ptr.dtype.element_ty), mask=(i < s)[:, None] & columns)


class _Band(torch.autograd.Function):
    """out [rows, s, d] of x [rows, s, d] and p [rows, s, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        x, p = x.contiguous(), p.contiguous()
        out = torch.empty_like(x)
        rows, s, d = x.shape
        sizes = {"WIDTH": p.shape[2], "N": _TOKENS, "D": triton.next_power_of_2(d)}
        band_forward[(triton.cdiv(s, _TOKENS), rows)](x, p, out, s, d, **sizes)
        ctx.save_for_backward(x, p)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_x, d_p = torch.empty_like(x), torch.empty_like(p)
        rows, s, d = x.shape
        sizes = {"WIDTH": p.shape[2], "N": _TOKENS, "D": triton.next_power_of_2(d)}
        grid = (triton.cdiv(s, _TOKENS), rows)
        band_backward[grid](x, p, d_out, d_x, d_p, s, d, **sizes)
        return d_x, d_p


def _averages(alpha: Tensor, weight: Tensor, width: int) -> Tensor:
    """What every token's state consists of, float32 [rows, s, width], from [rows, s] each."""
    share, parts = torch.ones_like(weight), [weight]
    for m in range(1, width):
        # beyond the first token alpha is 0
        share = share * F.pad(alpha, (m - 1, 0))[:, : alpha.shape[1]]
        parts.append(share * F.pad(weight, (m, 0))[:, : weight.shape[1]])
    p = torch.stack(parts, -1)
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


def merge(
    key: Tensor, value: Tensor, alpha: Tensor, weight: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """As `dms_train.method.dmc.merge.merge`, in float32.

    Args:
        key: [s, b, g, d].
        value: [s, b, g, d].
        alpha: [s, b, g]; 0 at the first token.
        weight: [s, b, g].
        width: Tokens that a slot averages.
    """
    s, b, g, d = key.shape
    alpha, weight = (x.float().permute(1, 2, 0).reshape(b * g, s) for x in (alpha, weight))
    p = _averages(alpha, weight, min(width, s))
    found = []
    for x in (key, value):
        rows = _Band.apply(x.permute(1, 2, 0, 3).reshape(b * g, s, d), p)
        found.append(rows.view(b, g, s, d).permute(2, 0, 1, 3))
    return found[0], found[1]
