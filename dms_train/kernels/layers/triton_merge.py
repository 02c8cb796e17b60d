"""DMC's merge in one pass over keys and values, forward and backward.

The first kernel computes the weights of every token's average, [rows, s, width]. With S_im the
product of the alphas of the m tokens from i backwards:

    w_im = S_im omega_{i-m}             p_im = w_im / sum_m w_im
    domega_j = sum_m S_{j+m,m} dw_{j+m,m}
    dalpha_j = sum_m S_{j+m,m} G_{j+m,m}
    G_im = omega_{i-m-1} dw_{i,m+1} + alpha_{i-m-1} G_{i,m+1}

The second kernel adds the tokens:

    out_i = sum_m p_im x_{i-m}          dx_j = sum_m p_{j+m,m} dout_{j+m}
    dp_im = dout_i . x_{i-m}
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TOKENS = 32  # tokens of a program that adds tokens
_WEIGHTS = 128  # tokens of a program that makes weights
_TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32


@triton.jit
def weights_forward(alpha_ptr, weight_ptr, p_ptr, s, WIDTH: tl.constexpr, N: tl.constexpr):
    """Compute the weights of the averages of N tokens of one row."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    total, share = tl.zeros((N,), tl.float32), tl.full((N,), 1.0, tl.float32)
    for m in range(WIDTH):
        at, inside = row * s + i - m, (i >= m) & (i < s)
        total += share * tl.load(weight_ptr + at, mask=inside, other=0.0)
        share *= tl.load(alpha_ptr + at, mask=inside, other=0.0)
    total, share = tl.maximum(total, _TINY), tl.full((N,), 1.0, tl.float32)
    for m in range(WIDTH):
        at, inside = row * s + i - m, (i >= m) & (i < s)
        w = share * tl.load(weight_ptr + at, mask=inside, other=0.0)
        tl.store(p_ptr + (row * s + i) * WIDTH + m, w / total, mask=i < s)
        share *= tl.load(alpha_ptr + at, mask=inside, other=0.0)


@triton.jit
def weights_backward(
    alpha_ptr, weight_ptr, p_ptr, d_p_ptr, to_alpha_ptr, to_weight_ptr, s,
    WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the averages of N tokens to the tokens in them."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    own = (row * s + i) * WIDTH
    total, share = tl.zeros((N,), tl.float32), tl.full((N,), 1.0, tl.float32)
    mean = tl.zeros((N,), tl.float32)
    for m in range(WIDTH):
        at, inside = row * s + i - m, (i >= m) & (i < s)
        total += share * tl.load(weight_ptr + at, mask=inside, other=0.0)
        share *= tl.load(alpha_ptr + at, mask=inside, other=0.0)
        d_p = tl.load(d_p_ptr + own + m, mask=i < s, other=0.0)
        mean += d_p * tl.load(p_ptr + own + m, mask=i < s, other=0.0)
    total, chain = tl.maximum(total, _TINY), tl.zeros((N,), tl.float32)
    for back in range(WIDTH):
        m = WIDTH - 1 - back
        tl.store(to_alpha_ptr + own + m, chain, mask=i < s)
        at, inside = row * s + i - m, (i >= m) & (i < s)
        d_w = (tl.load(d_p_ptr + own + m, mask=i < s, other=0.0) - mean) / total
        chain *= tl.load(alpha_ptr + at, mask=inside, other=0.0)
        chain += d_w * tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.debug_barrier()  # the stored chains are read back below
    share = tl.full((N,), 1.0, tl.float32)
    for m in range(WIDTH):
        at, inside = row * s + i - m, (i >= m) & (i < s)
        d_w = (tl.load(d_p_ptr + own + m, mask=i < s, other=0.0) - mean) / total
        chain = tl.load(to_alpha_ptr + own + m, mask=i < s, other=0.0)
        tl.store(to_weight_ptr + own + m, share * d_w, mask=i < s)
        tl.store(to_alpha_ptr + own + m, share * chain, mask=i < s)
        share *= tl.load(alpha_ptr + at, mask=inside, other=0.0)


@triton.jit
def weights_gather(
    to_alpha_ptr, to_weight_ptr, d_alpha_ptr, d_weight_ptr, s,
    WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N tokens of one row: sums over the averages that contain them."""
    row, j = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    d_alpha, d_weight = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for m in range(WIDTH):
        at = (row * s + j + m) * WIDTH + m
        d_alpha += tl.load(to_alpha_ptr + at, mask=j + m < s, other=0.0)
        d_weight += tl.load(to_weight_ptr + at, mask=j + m < s, other=0.0)
    tl.store(d_alpha_ptr + row * s + j, d_alpha, mask=j < s)
    tl.store(d_weight_ptr + row * s + j, d_weight, mask=j < s)


@triton.jit
def band_forward(
    x_ptr, p_ptr, out_ptr, s, d, WIDTH: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """Compute the averages of N tokens of one row."""
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
    """Compute the gradients of N tokens of one row, and of the weights of their averages."""
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
    """Compute out [rows, s, d] of x [rows, s, d] and p [rows, s, width]."""

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
    @once_differentiable  # the kernels record no graph
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_x, d_p = torch.empty_like(x), torch.empty_like(p)
        rows, s, d = x.shape
        sizes = {"WIDTH": p.shape[2], "N": _TOKENS, "D": triton.next_power_of_2(d)}
        grid = (triton.cdiv(s, _TOKENS), rows)
        band_backward[grid](x, p, d_out, d_x, d_p, s, d, **sizes)
        return d_x, d_p


class _Averages(torch.autograd.Function):
    """Differentiable weights of tokens in states, float32 [rows, s, width] from [rows, s] each."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, weight: Tensor, width: int) -> Tensor:
        alpha, weight = alpha.contiguous(), weight.contiguous()
        rows, s = alpha.shape
        p = alpha.new_empty(rows, s, width)
        grid = (triton.cdiv(s, _WEIGHTS), rows)
        weights_forward[grid](alpha, weight, p, s, WIDTH=width, N=_WEIGHTS)
        ctx.save_for_backward(alpha, weight, p)
        return p

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(ctx: Any, d_p: Tensor) -> tuple[Tensor, Tensor, None]:
        alpha, weight, p = ctx.saved_tensors
        rows, s, width = p.shape
        to_alpha, to_weight = torch.empty_like(p), torch.empty_like(p)
        d_alpha, d_weight = torch.empty_like(alpha), torch.empty_like(weight)
        grid, sizes = (triton.cdiv(s, _WEIGHTS), rows), {"WIDTH": width, "N": _WEIGHTS}
        inputs = (alpha, weight, p, d_p.contiguous())
        weights_backward[grid](*inputs, to_alpha, to_weight, s, **sizes)
        weights_gather[grid](to_alpha, to_weight, d_alpha, d_weight, s, **sizes)
        return d_alpha, d_weight, None


def merge(
    key: Tensor, value: Tensor, alpha: Tensor, weight: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Merge tokens like `dms_train.method.dmc.merge.merge`, in float32.

    Args:
        key: [s, b, g, d].
        value: [s, b, g, d].
        alpha: [s, b, g]; 0 at the first token.
        weight: [s, b, g].
        width: Tokens that a slot averages.
    """
    s, b, g, d = key.shape
    alpha, weight = (x.float().permute(1, 2, 0).reshape(b * g, s) for x in (alpha, weight))
    p = _Averages.apply(alpha, weight, min(width, s))
    averages = []
    for x in (key, value):
        rows = _Band.apply(x.permute(1, 2, 0, 3).reshape(b * g, s, d), p)
        averages.append(rows.view(b, g, s, d).permute(2, 0, 1, 3))
    return averages[0], averages[1]
