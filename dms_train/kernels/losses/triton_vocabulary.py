"""Kernels for the losses of `vocabulary` that read every logit once; see there for the formulas.

A program handles one row. Each thread keeps its own running statistics, so that threads
communicate only at the end of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence

# Measured on an H200; sums and gradients read and write at the speed of its memory.
ACCUMULATORS = 512  # running statistics of a row
VECTOR = 8  # neighbouring columns of one accumulator: 16 bytes of bf16
SUM_WARPS = 8
GRADIENT_TILE = 2048  # columns of a program that writes gradients
GRADIENT_WARPS = 4
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # maximum over zero columns


@triton.jit
def _load(pointer, column, columns, inverse_temperature, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(pointer + column, mask=column < columns, other=-float("inf"))
    else:
        x = tl.load(pointer + column)
    return x.to(tl.float32) * inverse_temperature


@triton.jit
def _add_tile(p, q, top_p, sum_p, top_q, sum_q, dot):
    """Add columns of p and q [ACCUMULATORS, VECTOR] to running statistics [ACCUMULATORS]."""
    now_p = tl.maximum(top_p, tl.max(p, 1))
    now_q = tl.maximum(top_q, tl.max(q, 1))
    shrink_p = tl.exp(top_p - now_p)
    moved = (top_p - now_p) - (top_q - now_q)
    p -= now_p[:, None]
    q -= now_q[:, None]
    exp_p = tl.exp(p)
    terms = tl.where(exp_p > 0, exp_p * (p - q), 0.0)
    dot = shrink_p * (dot + sum_p * moved) + tl.sum(terms, 1)
    sum_p = shrink_p * sum_p + tl.sum(exp_p, 1)
    sum_q = tl.exp(top_q - now_q) * sum_q + tl.sum(tl.exp(q), 1)
    return now_p, sum_p, now_q, sum_q, dot


@triton.jit
def sum_divergence(
    p_ptr,
    q_ptr,
    out_ptr,  # float32 [5, n_rows]
    columns,
    p_stride,
    q_stride,
    n_rows,
    inverse_temperature,
    ACCUMULATORS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Compute the statistics of one row for `divergence_statistics`."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_ptr + row * p_stride
    q_row = q_ptr + row * q_stride
    offsets = tl.arange(0, ACCUMULATORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top_p = tl.full([ACCUMULATORS], _LOWEST, tl.float32)
    top_q = tl.full([ACCUMULATORS], _LOWEST, tl.float32)
    sum_p = tl.zeros([ACCUMULATORS], tl.float32)
    sum_q = tl.zeros([ACCUMULATORS], tl.float32)
    dot = tl.zeros([ACCUMULATORS], tl.float32)
    whole = columns // (ACCUMULATORS * VECTOR) * (ACCUMULATORS * VECTOR)
    for first in range(0, whole, ACCUMULATORS * VECTOR):
        p = _load(p_row, first + offsets, columns, inverse_temperature, False)
        q = _load(q_row, first + offsets, columns, inverse_temperature, False)
        top_p, sum_p, top_q, sum_q, dot = _add_tile(p, q, top_p, sum_p, top_q, sum_q, dot)
    if whole < columns:
        p = _load(p_row, whole + offsets, columns, inverse_temperature, True)
        q = _load(q_row, whole + offsets, columns, inverse_temperature, True)
        top_p, sum_p, top_q, sum_q, dot = _add_tile(p, q, top_p, sum_p, top_q, sum_q, dot)
    all_p = tl.max(top_p, 0)
    all_q = tl.max(top_q, 0)
    share_p = tl.exp(top_p - all_p)
    dot += sum_p * ((top_p - all_p) - (top_q - all_q))
    tl.store(out_ptr + row, all_p)
    tl.store(out_ptr + n_rows + row, tl.sum(share_p * sum_p, 0))
    tl.store(out_ptr + 2 * n_rows + row, all_q)
    tl.store(out_ptr + 3 * n_rows + row, tl.sum(tl.exp(top_q - all_q) * sum_q, 0))
    tl.store(out_ptr + 4 * n_rows + row, tl.sum(share_p * dot, 0))


@triton.jit
def write_divergence_gradient(
    p_ptr,
    q_ptr,
    rows_ptr,  # float32 [5, n_rows]
    columns,
    width,
    p_stride,
    q_stride,
    n_rows,
    inverse_temperature,
    temperature,
    STUDENT_IS_Q: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the gradient of one tile of columns of one row, and write it over p or q."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    p_row = p_ptr + row * p_stride
    q_row = q_ptr + row * q_stride
    p = _load(p_row, column, columns, inverse_temperature, True)
    q = _load(q_row, column, columns, inverse_temperature, True)
    p = p - tl.load(rows_ptr + row) - tl.load(rows_ptr + n_rows + row)
    q = q - tl.load(rows_ptr + 2 * n_rows + row) - tl.load(rows_ptr + 3 * n_rows + row)
    probability = tl.exp(p)
    if STUDENT_IS_Q:
        gradient = tl.exp(q) - probability
        student = q_row
    else:
        kl = tl.load(rows_ptr + 4 * n_rows + row)
        gradient = tl.where(probability > 0, probability * (p - q - kl), 0.0)
        student = p_row
    gradient = (gradient * temperature).to(student.dtype.element_ty)
    tl.store(student + column, gradient, mask=column < width)


@triton.jit
def _add_one_tile(x, top, total):
    now = tl.maximum(top, tl.max(x, 1))
    total = tl.exp(top - now) * total + tl.sum(tl.exp(x - now[:, None]), 1)
    return now, total


@triton.jit
def sum_exponentials(
    x_ptr,
    out_ptr,  # float32 [2, n_rows]
    columns,
    stride,
    n_rows,
    ACCUMULATORS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Compute the statistics of one row for `nll_statistics`."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    offsets = tl.arange(0, ACCUMULATORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full([ACCUMULATORS], _LOWEST, tl.float32)
    total = tl.zeros([ACCUMULATORS], tl.float32)
    whole = columns // (ACCUMULATORS * VECTOR) * (ACCUMULATORS * VECTOR)
    for first in range(0, whole, ACCUMULATORS * VECTOR):
        top, total = _add_one_tile(_load(x_row, first + offsets, columns, 1.0, False), top, total)
    if whole < columns:
        top, total = _add_one_tile(_load(x_row, whole + offsets, columns, 1.0, True), top, total)
    highest = tl.max(top, 0)
    tl.store(out_ptr + row, highest)
    tl.store(out_ptr + n_rows + row, tl.sum(tl.exp(top - highest) * total, 0))


@triton.jit
def write_nll_gradient(
    x_ptr,
    rows_ptr,  # float32 [2, n_rows]
    labels_ptr,
    columns,
    width,
    stride,
    n_rows,
    TILE: tl.constexpr,
):
    """Replace one tile of columns of one row by its gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x_row = x_ptr + row * stride
    x = _load(x_row, column, columns, 1.0, True)
    x = x - tl.load(rows_ptr + row) - tl.load(rows_ptr + n_rows + row)
    gradient = tl.exp(x) - (column == tl.load(labels_ptr + row)).to(tl.float32)
    # a label of another shard may point into this one's padding
    gradient = tl.where(column < columns, gradient, 0.0)
    tl.store(x_row + column, gradient.to(x_ptr.dtype.element_ty), mask=column < width)


def divergence_statistics(p: Tensor, q: Tensor, columns: int, temperature: float) -> Tensor:
    """See `vocabulary.divergence_statistics`."""
    out = p.new_empty(5, p.shape[0], dtype=torch.float32)
    sum_divergence[(p.shape[0],)](
        p,
        q,
        out,
        columns,
        p.stride(0),
        q.stride(0),
        p.shape[0],
        1.0 / temperature,
        ACCUMULATORS=ACCUMULATORS,
        VECTOR=VECTOR,
        num_warps=SUM_WARPS,
    )
    return out


def divergence_gradient_(
    p: Tensor, q: Tensor, columns: int, rows: Tensor, divergence: Divergence
) -> None:
    """See `vocabulary.divergence_gradient_`."""
    n_rows, width = p.shape
    write_divergence_gradient[(n_rows, triton.cdiv(width, GRADIENT_TILE))](
        p,
        q,
        rows,
        columns,
        width,
        p.stride(0),
        q.stride(0),
        n_rows,
        1.0 / divergence.temperature,
        divergence.temperature,
        STUDENT_IS_Q=divergence.student_is_q,
        TILE=GRADIENT_TILE,
        num_warps=GRADIENT_WARPS,
    )


def nll_statistics(logits: Tensor, columns: int) -> Tensor:
    """See `vocabulary.nll_statistics`."""
    out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
    sum_exponentials[(logits.shape[0],)](
        logits,
        out,
        columns,
        logits.stride(0),
        logits.shape[0],
        ACCUMULATORS=ACCUMULATORS,
        VECTOR=VECTOR,
        num_warps=SUM_WARPS,
    )
    return out


def nll_gradient_(logits: Tensor, columns: int, rows: Tensor, labels: Tensor) -> None:
    """See `vocabulary.nll_gradient_`."""
    n_rows, width = logits.shape
    write_nll_gradient[(n_rows, triton.cdiv(width, GRADIENT_TILE))](
        logits,
        rows,
        labels,
        columns,
        width,
        logits.stride(0),
        n_rows,
        TILE=GRADIENT_TILE,
        num_warps=GRADIENT_WARPS,
    )
