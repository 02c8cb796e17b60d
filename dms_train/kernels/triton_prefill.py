"""Attention of many queries over survivors, read from pages, and the latest tokens, read densely.

A key that is older than the window for the first query of a block is older for all of them, so
only survivors among those keys matter and no score needs a mask. A block of queries therefore goes
through its KV head's list of survivors up to an edge, then through the dense keys from that edge
to its own last query, where position and decision of every pair are looked at.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s dense tokens,
d head size. A lane is a (sequence, KV head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.triton_pack import EDGE, Pages, Stretch

_LOG2_E = 1.4426950408889634


@triton.jit
def _fold(acc, total, top, scores, v, factor, PRECISION: tl.constexpr):
    """One step of the softmax over key blocks, in powers of two."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total * shrink + tl.sum(weights, 1), new_top


@triton.jit
def _load_rows(base, rows, present, D: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of d elements, [rows, PADDED]; absent ones are 0."""
    channels = tl.arange(0, PADDED)
    at = base + rows[:, None] * D + channels
    if MASKED:
        return tl.load(at, mask=present[:, None] & (channels < D), other=0.0)
    if D < PADDED:
        return tl.load(at, mask=(channels < D) & (rows[:, None] >= 0), other=0.0)
    return tl.load(at)


@triton.jit
def _paged_rows(table, slot, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Row of each of the slots slot .. slot + BLOCK - 1 of a lane, int64."""
    slots = slot + tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:
        return tl.load(table + slot // PAGE) + slots % PAGE
    return tl.load(table + slots // PAGE) + slots % PAGE


@triton.jit
def _attend_kernel(
    query, key, value, out, key_base, value_base, key_rows, value_rows, evicted, edges, start, order,
    q_strides, k_strides, v_strides, o_strides, heads, s, n, pages, newest, window, factor,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of queries of one query head; lanes with most to read come first."""
    blocks = tl.cdiv(n, BLOCK_M)
    job = tl.program_id(0)
    lane = tl.load(order + job // (blocks * GROUP)).to(tl.int32)
    block = blocks - 1 - job % (blocks * GROUP) // GROUP
    b, h = lane // heads, lane % heads
    head = h * GROUP + job % GROUP
    query += b.to(tl.int64) * q_strides[0] + head * q_strides[1]
    key += b.to(tl.int64) * k_strides[0] + h * k_strides[1]
    value += b.to(tl.int64) * v_strides[0] + h * v_strides[1]
    out += b.to(tl.int64) * o_strides[0] + head * o_strides[1]
    key_rows += lane * pages
    value_rows += lane * pages
    evicted += lane.to(tl.int64) * s

    channels = tl.arange(0, PADDED)
    asked = block * BLOCK_M + tl.arange(0, BLOCK_M)
    at = query + asked.to(tl.int64)[:, None] * q_strides[2] + channels
    q = tl.load(at, mask=(asked[:, None] < n) & (channels < D), other=0.0)
    i = asked + (s - n)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)

    edge = tl.maximum(tl.minimum(block * BLOCK_M + s - n - window, newest), 0) // EDGE
    count = tl.load(edges + lane * (tl.cdiv(s, EDGE) + 1) + edge)
    full = count // BLOCK_N
    everything = asked < n
    if OVERLAP:
        if full > 0:
            rows = _paged_rows(key_rows, 0, BLOCK_N, PAGE)
            scores = tl.dot(
                q, tl.trans(_load_rows(key_base, rows, rows, D, PADDED, False)),
                input_precision=PRECISION,
            )
            for t in tl.range(1, full, num_stages=STAGES):
                rows = _paged_rows(key_rows, t * BLOCK_N, BLOCK_N, PAGE)
                k = _load_rows(key_base, rows, rows, D, PADDED, False)
                coming = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                rows = _paged_rows(value_rows, (t - 1) * BLOCK_N, BLOCK_N, PAGE)
                v = _load_rows(value_base, rows, rows, D, PADDED, False)
                acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
                scores = coming
            rows = _paged_rows(value_rows, (full - 1) * BLOCK_N, BLOCK_N, PAGE)
            v = _load_rows(value_base, rows, rows, D, PADDED, False)
            acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    else:
        for t in tl.range(0, full, num_stages=STAGES):
            rows = _paged_rows(key_rows, t * BLOCK_N, BLOCK_N, PAGE)
            k = _load_rows(key_base, rows, rows, D, PADDED, False)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            rows = _paged_rows(value_rows, t * BLOCK_N, BLOCK_N, PAGE)
            v = _load_rows(value_base, rows, rows, D, PADDED, False)
            acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    slots = full * BLOCK_N + tl.arange(0, BLOCK_N)
    if full * BLOCK_N < count:
        held = slots < count
        rows = tl.load(key_rows + slots // PAGE, mask=held, other=0) + slots % PAGE
        k = _load_rows(key_base, rows, held, D, PADDED, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(held[None, :], scores, float("-inf"))
        rows = tl.load(value_rows + slots // PAGE, mask=held, other=0) + slots % PAGE
        v = _load_rows(value_base, rows, held, D, PADDED, True)
        acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    first = tl.load(start + b)
    end = tl.minimum(block * BLOCK_M + BLOCK_M + s - n, s)
    for base in tl.range(edge * EDGE, end, BLOCK_N, num_stages=2):
        j = base + tl.arange(0, BLOCK_N)
        present = (j < s) & (j >= first)
        at_k = key + j.to(tl.int64)[:, None] * k_strides[2] + channels
        k = tl.load(at_k, mask=present[:, None] & (channels < D), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        marked = tl.load(evicted + j, mask=present, other=1) != 0
        # a key is read up to its last distance
        reach = tl.where(marked, window, s)
        distance = i[:, None] - j[None, :]
        visible = (distance >= 0) & (distance <= reach[None, :]) & present[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        at_v = value + j.to(tl.int64)[:, None] * v_strides[2] + channels
        v = tl.load(at_v, mask=present[:, None] & (channels < D), other=0.0)
        acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = out + asked.to(tl.int64)[:, None] * o_strides[2] + channels
    tl.store(at, acc.to(out.dtype.element_ty), mask=everything[:, None] & (channels < D))


def attend_stretch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stretch: Stretch,
    pages: Pages,
    *,
    window: int,
    scale: float,
    config: dict | None = None,
) -> Tensor:
    b, hq, n, d = query.shape
    h, s = key.shape[1:3]
    out = torch.empty(b, n, hq, d, dtype=query.dtype, device=query.device).transpose(1, 2)
    order = stretch.lengths.flatten().argsort(descending=True)
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3, "OVERLAP": False} | (config or {})
    grid = (triton.cdiv(n, config["BLOCK_M"]) * hq * b,)
    _attend_kernel[grid](
        query, key, value, out, pages.key, pages.value, pages.key_rows, pages.value_rows,
        stretch.evicted.view(torch.uint8), stretch.edges, stretch.start, order,
        query.stride()[:3], key.stride()[:3], value.stride()[:3], out.stride()[:3],
        h, s, n, pages.key_rows.shape[-1], s - stretch.kept, window, scale * _LOG2_E,
        GROUP=hq // h, PAGE=pages.page_slots, D=d, PADDED=triton.next_power_of_2(d), EDGE=EDGE,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **config,
    )  # fmt: skip
    return out
