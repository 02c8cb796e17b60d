"""Matrix products of few tokens with a weight matrix, for decode steps.

Such a product reads every weight once and computes little. A program reads BLOCK_N rows of the
weights (or a part of their columns) and keeps several blocks of them in flight. It also computes
the layer's neighbouring operations: RMSNorm before the product, SwiGLU or the residual addition
after it.

RMSNorm is divided between two products. The first writes the residual stream, the stream times the
norm's weight, and the sum of squares of each block of channels. The second divides its results by
the root of their mean.

On Hopper, a kernel is launched while the previous one still runs. Before it waits for the previous
kernel, it fetches its first weights into the L2 cache. If a program holds few weights, it reads all
of them.

Shape letters: m tokens, k channels of the input, n of the output, p blocks of the input's channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.triton_fetch import fetch
from dms_train.kernels.launch import can_overlap
from dms_train.kernels.layers.types import LinearWorkspace, NormedInput

ROWS = 64  # outputs of a program
_TOKENS = 64  # most tokens of a program
_PROGRAMS = 96  # products with fewer are split
_SMALL = (
    132  # with fewer programs some multiprocessors idle, so that blocks are smaller for few tokens
)
_HELD = 512  # columns of 16 bits that a program reads before the previous kernel has ended
_FETCHED = 128  # columns fetched into the L2 cache before the previous kernel has ended


class _Tiling(NamedTuple):
    """Launch parameters of a product.

    Attributes:
        rows: Outputs of a program.
        columns: Input channels read at a time.
        split: Programs that share the input channels of an output.
        stages: Blocks of weights in flight.
        warps: Warps of a program.
        held: Whether a program has one block of weights, which it reads before the previous kernel
            has ended.
    """

    rows: int
    columns: int
    split: int
    stages: int
    warps: int = 4
    held: bool = False


@triton.jit
def _fetch(weight_ptr, row, width, begin, COUNT: tl.constexpr):
    """Fetch COUNT columns of rows of the weights into the L2 cache."""
    column = begin + tl.arange(0, COUNT // 64) * 64  # a cache line holds 64 of 16 bits
    column = tl.minimum(column, width - 1)
    fetch(weight_ptr + row[:, None] * width + column[None, :])


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    row,
    n,
    m,
    k,
    begin,
    end,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PAIR: tl.constexpr,
    pair_rows,
    token,
):
    """Multiply rows of the weights by tokens of the input over columns begin .. end - 1.

    Returns:
        float32 [BLOCK_N, M]; with PAIR, also the products of the rows at distance `pair_rows`.
    """
    channel = tl.arange(0, BLOCK_K)
    first = tl.zeros([BLOCK_N, M], tl.float32)
    second = tl.zeros([BLOCK_N, M], tl.float32)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * k + channel[None, :]
    x_at = x_ptr + token[:, None] * k + channel[None, :]
    real, inside = (token < m)[:, None], (row < n)[:, None]
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if EVEN:
            x_mask, weight_mask = real, inside
        else:
            there = (start + channel < end)[None, :]
            x_mask, weight_mask = real & there, inside & there
        weight = tl.load(weight_at + start, mask=weight_mask, other=0.0)
        x = tl.trans(tl.load(x_at + start, mask=x_mask, other=0.0))
        first = tl.dot(weight, x, first, input_precision="ieee")
        if PAIR:
            other = tl.load(
                weight_at + pair_rows.to(tl.int64) * k + start, mask=weight_mask, other=0.0
            )
            second = tl.dot(other, x, second, input_precision="ieee")
    return first, second


@triton.jit
def _held_weights(weight_ptr, row, n, k, begin, BLOCK_K: tl.constexpr):
    """Load the block of weights of a program that has one, [rows, BLOCK_K]."""
    channel = begin + tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * k + channel[None, :]
    return tl.load(weight_ptr + at, mask=(row < n)[:, None], other=0.0)


@triton.jit
def _held_product(
    x_ptr, weight, token, m, k, begin, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Multiply this block by tokens of the input, float32 [BLOCK_N, M]."""
    channel = begin + tl.arange(0, BLOCK_K)
    at = token[:, None] * k + channel[None, :]
    x = tl.load(x_ptr + at, mask=(token < m)[:, None], other=0.0)
    empty = tl.zeros([BLOCK_N, M], tl.float32)
    return tl.dot(weight, tl.trans(x), empty, input_precision="ieee")


@triton.jit
def _operands(
    row, token, m, n, bias_ptr, squares_ptr, blocks, residual_ptr, norm_ptr, P: tl.constexpr
):
    """Load the operands of `_finish`: squares, bias, residual stream, norm's weight; 0 for none.

    Loaded before the matrix product, because loading them afterwards would stall the kernel.
    """
    squares, bias, before, norm = 0.0, 0.0, 0.0, 0.0
    if squares_ptr is not None:
        block = tl.arange(0, P)
        known = (block < blocks)[:, None] & (token < m)[None, :]
        squares = tl.load(squares_ptr + block[:, None] * m + token[None, :], mask=known, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=row < n, other=0.0)
    if residual_ptr is not None:
        inside = (row < n)[:, None] & (token < m)[None, :]
        at = token[None, :] * n + row[:, None]
        before = tl.load(residual_ptr + at, mask=inside, other=0.0)
        norm = tl.load(norm_ptr + row, mask=row < n, other=0.0)
    return squares, bias, before, norm


@triton.jit
def _finish(
    total,
    pair,
    squares,
    bias,
    before,
    norm,
    row,
    tile,
    token,
    m,
    n,
    k,
    bias_ptr,
    squares_ptr,
    epsilon,
    residual_ptr,
    scaled_ptr,
    next_squares_ptr,
    out_ptr,
    PAIR: tl.constexpr,
):
    """Finish a product: divide by the norm, add bias, apply SwiGLU, add to the residual, store."""
    at = token[None, :] * n + row[:, None]
    inside = (row < n)[:, None] & (token < m)[None, :]
    if squares_ptr is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / k + epsilon)[None, :]
        total = total * factor
        pair = pair * factor
    if bias_ptr is not None:
        total += bias.to(tl.float32)[:, None]
    if PAIR:
        total = total * tl.sigmoid(total) * pair
    if residual_ptr is not None:
        kind = residual_ptr.dtype.element_ty
        total = (before.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
        tl.store(residual_ptr + at, total, mask=inside)
        wide = total.to(tl.float32)
        tl.store(scaled_ptr + at, (wide * norm.to(tl.float32)[:, None]).to(kind), mask=inside)
        squares = tl.sum(tl.where(inside, wide * wide, 0.0), 0)
        tl.store(next_squares_ptr + tile * m + token, squares, mask=token < m)
    else:
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    residual_ptr,
    norm_ptr,
    scaled_ptr,
    next_squares_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    m,
    n,
    k,
    blocks,
    epsilon,
    M: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PAIR: tl.constexpr,
    FETCH: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = block * M + tl.arange(0, M)
    columns = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT) * BLOCK_K
    begin = share * columns
    end = tl.minimum(begin + columns, k)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if HELD:
        weight = _held_weights(weight_ptr, row, n, k, begin, BLOCK_K)
    elif OVERLAP:
        first = tl.minimum(row, n - 1).to(tl.int64)
        _fetch(weight_ptr, first, k, begin, FETCH)
        if PAIR:
            _fetch(weight_ptr, first + n, k, begin, FETCH)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    squares, bias, before, norm = _operands(
        row, token, m, n, bias_ptr, squares_ptr, blocks, residual_ptr, norm_ptr, P
    )
    if HELD:
        total = _held_product(x_ptr, weight, token, m, k, begin, M, BLOCK_N, BLOCK_K)
        pair = 0.0
    else:
        total, pair = _product(
            x_ptr, weight_ptr, row, n, m, k, begin, end, M, BLOCK_N, BLOCK_K, EVEN, STAGES, PAIR,
            n, token,
        )  # fmt: skip
    last = True
    if SPLIT > 1:
        place = block * tl.num_programs(0) + tile
        within = tl.arange(0, BLOCK_N)[:, None] * M + tl.arange(0, M)[None, :]
        part_at = part_ptr + place.to(tl.int64) * (SPLIT * BLOCK_N * M) + within
        real = (token < m)[None, :] & (row < n)[:, None]
        tl.store(part_at + share * (BLOCK_N * M), total, mask=real)
        tl.debug_barrier()  # the whole part is written before it is announced
        seen = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel", scope="gpu")
        last = seen == SPLIT - 1
        if last:
            total = tl.zeros([BLOCK_N, M], tl.float32)
            for other in tl.static_range(SPLIT):  # always in the same order
                total += tl.load(
                    part_at + other * (BLOCK_N * M), mask=real, other=0.0, cache_modifier=".cg"
                )
            tl.store(arrived_ptr + place, 0)
    if last:
        _finish(
            total, pair, squares, bias, before, norm, row, tile, token, m, n, k, bias_ptr,
            squares_ptr, epsilon, residual_ptr, scaled_ptr, next_squares_ptr, out_ptr, PAIR,
        )  # fmt: skip


def _padded(tokens: int) -> int:
    """Return the tokens of a program; tensor cores take 16."""
    return min(_TOKENS, max(16, triton.next_power_of_2(tokens)))


def _tiling(m: int, n: int, k: int, itemsize: int, *, pair: bool, adds: bool) -> _Tiling:
    """Choose the launch parameters of a product [m, k] with n outputs; measured on an H200.

    Args:
        m: Tokens.
        n: Outputs.
        k: Input channels.
        itemsize: Bytes of a weight.
        pair: Whether it is a pair of products for SwiGLU.
        adds: Whether it is added to the residual stream, in blocks of `ROWS`.
    """
    tiles, split = triton.cdiv(n, ROWS), 1
    if _PROGRAMS <= tiles < _SMALL and m <= 16 and not pair and not adds:
        return _Tiling(16, 1024 // itemsize, 1, 3, warps=2)
    held = triton.cdiv(k, _HELD)  # programs that share the channels
    fits = itemsize == 2 and k % _HELD == 0 and _PROGRAMS <= tiles * held <= 2 * _PROGRAMS
    if fits and 1 < held <= 8 and m <= 16 and not pair:
        return _Tiling(ROWS, _HELD, held, 1, held=True)
    columns = 256 // itemsize  # two cache lines of a row
    while not pair and tiles * split < _PROGRAMS and k >= 4 * split * columns and split < 8:
        split *= 2
    return _Tiling(ROWS, columns, split, 4 if pair or m > 32 else 6)


def _launch(
    x: Tensor,
    weight: Tensor,
    memory: LinearWorkspace,
    *,
    n: int,
    bias: Tensor | None = None,
    normed: NormedInput | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    after: NormedInput | None = None,
    out: Tensor | None = None,
) -> None:
    m, k = x.shape
    pair = weight.shape[0] > n
    tiling = _tiling(m, n, k, x.element_size(), pair=pair, adds=residual is not None)
    width = _padded(m)
    blocks = 1 if normed is None else len(normed.squares)
    overlap = can_overlap(x.device)
    _linear_kernel[(triton.cdiv(n, tiling.rows), tiling.split, triton.cdiv(m, width))](
        x,
        weight,
        bias,
        None if normed is None else normed.squares,
        residual,
        norm,
        None if after is None else after.scaled,
        None if after is None else after.squares,
        out,
        memory.parts,
        memory.arrived,
        m,
        n,
        k,
        blocks,
        0.0 if normed is None else normed.epsilon,
        M=width,
        P=triton.next_power_of_2(blocks),
        BLOCK_N=tiling.rows,
        BLOCK_K=tiling.columns,
        SPLIT=tiling.split,
        EVEN=k % (tiling.columns * tiling.split) == 0,
        STAGES=tiling.stages,
        PAIR=pair,
        FETCH=_FETCHED,
        HELD=tiling.held,
        OVERLAP=overlap,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=overlap,
    )


def normed_input(residual: Tensor, epsilon: float) -> NormedInput:
    """Allocate the input of products; see `LayerKernels.normed_input`."""
    m, k = residual.shape
    squares = residual.new_empty(triton.cdiv(k, ROWS), m, dtype=torch.float32)
    return NormedInput(torch.empty_like(residual), squares, epsilon)


def linear_workspace(tokens: int, device: torch.device) -> LinearWorkspace:
    """Allocate scratch memory for products of this many tokens.

    Products of fewer than `_PROGRAMS` blocks are split into at most 2 * `_PROGRAMS` programs. So
    are products of exactly `_PROGRAMS` blocks with held weights.
    """
    blocks = triton.cdiv(tokens, _TOKENS)
    partial_sums = torch.empty(2 * _PROGRAMS * ROWS * _padded(tokens) * blocks, device=device)
    arrived = torch.zeros(_PROGRAMS * blocks, dtype=torch.int32, device=device)
    return LinearWorkspace(partial_sums, arrived)


def linear(
    x: NormedInput,
    weight: Tensor,
    memory: LinearWorkspace,
    *,
    out: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by a weight matrix; see `LayerKernels.linear`."""
    _launch(x.scaled, weight, memory, n=len(weight), bias=bias, normed=x, out=out)
    return out


def swiglu_linear(
    x: NormedInput, weight: Tensor, memory: LinearWorkspace, *, out: Tensor
) -> Tensor:
    """Multiply by two weight matrices and apply SwiGLU; see `LayerKernels.swiglu_linear`."""
    _launch(x.scaled, weight, memory, n=len(weight) // 2, normed=x, out=out)
    return out


def add_linear(
    x: Tensor,
    weight: Tensor,
    memory: LinearWorkspace,
    *,
    residual: Tensor,
    norm: Tensor,
    after: NormedInput,
) -> None:
    """Add a product to the residual stream; see `LayerKernels.add_linear`."""
    _launch(
        x,
        weight,
        memory,
        n=len(weight),
        residual=residual,
        norm=norm,
        after=after,
    )
