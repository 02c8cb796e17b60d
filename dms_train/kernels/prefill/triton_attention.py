"""Attention of many queries over kept tokens, read from pages, and the latest tokens, read densely.

A key outside the window of the first query of a block is outside the window of all its queries. Of
these keys, a block reads only the kept ones, without a mask: its KV head's list of kept tokens up
to an edge. It then reads the dense keys from this edge to its own last query, and masks every pair
by position and decision.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s dense tokens,
d head size. A KV list is one (sequence, KV head).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.prefill.lists import EDGE, Pages, PrefillChunk, Tokens

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(acc, total, top, scores, v, factor, PRECISION: tl.constexpr):
    """Compute one step of the softmax over key blocks, in powers of two."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total * shrink + tl.sum(weights, 1), new_top


@triton.jit
def _rows_at(base, rows, stride, present, D: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of d elements, [rows, PADDED]; missing rows are 0."""
    channels = tl.arange(0, PADDED)
    at = base + rows.to(tl.int64)[:, None] * stride + channels
    return tl.load(at, mask=present[:, None] & (channels < D), other=0.0)


@triton.jit
def _slot_rows(table, first, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Return the rows of slots `first` .. `first` + BLOCK - 1, counted from page 0."""
    slots = first + tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:
        return tl.load(table + first // PAGE).to(tl.int64) * (2 * PAGE) + slots % PAGE
    return tl.load(table + slots // PAGE).to(tl.int64) * (2 * PAGE) + slots % PAGE


# lengths differ from call to call and are no reason to compile again
@triton.jit(do_not_specialize=["heads", "group", "s", "n", "places", "newest", "window"])
def _attend_kernel(
    query, key, value, out, pages, table, evicted, edges, start, order, sinks,
    q_strides, k_strides, v_strides, o_strides, heads, group, s, n, places, newest, window, factor,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one block of queries of one query head; the longest KV lists come first."""
    blocks = tl.cdiv(n, BLOCK_M)
    job = tl.program_id(0)
    kv_list = tl.load(order + job // (blocks * group)).to(tl.int32)
    block = blocks - 1 - job % (blocks * group) // group
    b, h = kv_list // heads, kv_list % heads
    head = h * group + job % group
    query += b.to(tl.int64) * q_strides[0] + head * q_strides[1]
    key += b.to(tl.int64) * k_strides[0] + h * k_strides[1]
    value += b.to(tl.int64) * v_strides[0] + h * v_strides[1]
    out += b.to(tl.int64) * o_strides[0] + head * o_strides[1]
    table += kv_list * places
    evicted += kv_list.to(tl.int64) * s

    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _rows_at(query, queries, q_strides[2], queries < n, D, PADDED)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    edge = tl.maximum(tl.minimum(block * BLOCK_M + s - n - window, newest), 0) // EDGE
    count = tl.load(edges + kv_list * (tl.cdiv(s, EDGE) + 1) + edge)
    full = count // BLOCK_N * BLOCK_N
    always = tl.full([BLOCK_N], True, tl.int1)
    for slot in tl.range(0, full, BLOCK_N, num_stages=STAGES):
        rows = _slot_rows(table, slot, BLOCK_N, PAGE)
        k = _rows_at(pages, rows, D, always, D, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = _rows_at(pages, rows + PAGE, D, always, D, PADDED)
        acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    if full < count:
        slots = full + tl.arange(0, BLOCK_N)
        held = slots < count
        page = tl.load(table + slots // PAGE, mask=held, other=0).to(tl.int64)
        rows = page * (2 * PAGE) + slots % PAGE
        k = _rows_at(pages, rows, D, held, D, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(held[None, :], scores, float("-inf"))
        v = _rows_at(pages, rows + PAGE, D, held, D, PADDED)
        acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    first = tl.load(start + b)
    end = tl.minimum(block * BLOCK_M + BLOCK_M + s - n, s)
    for base in tl.range(edge * EDGE, end, BLOCK_N, num_stages=STAGES):
        j = base + tl.arange(0, BLOCK_N)
        present = (j < s) & (j >= first)
        k = _rows_at(key, j, k_strides[2], present, D, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        marked = tl.load(evicted + j, mask=present, other=1) != 0
        reach = tl.where(present, tl.where(marked, window, s), -1)
        distance = (queries + s - n)[:, None] - j[None, :]
        visible = (distance >= 0) & (distance <= reach[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        v = _rows_at(value, j, v_strides[2], present, D, PADDED)
        acc, total, top = _fold(acc, total, top, scores, v, factor, PRECISION)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    channels = tl.arange(0, PADDED)
    at = out + queries.to(tl.int64)[:, None] * o_strides[2] + channels
    tl.store(at, acc.to(out.dtype.element_ty), mask=(queries[:, None] < n) & (channels < D))


class Call(NamedTuple):
    """Arguments of `sparse.extend`."""

    tokens: Tokens
    chunk: PrefillChunk
    pages: Pages
    window: int
    scale: float
    sinks: Tensor | None = None

    @property
    def page_slots(self) -> int:
        """Slots of a page."""
        return self.pages.pages.shape[2]

    def order(self) -> Tensor:
        """KV lists by length, longest first, so that a launch ends with short ones."""
        return self.chunk.lengths.flatten().argsort(descending=True)

    def empty(self) -> Tensor:
        """Output of the queries, [b, h * r, n, d], tokens outermost in memory."""
        b, heads, n, d = self.tokens.query.shape
        return self.tokens.query.new_empty(b, n, heads, d).transpose(1, 2)


class PrefillTiles(NamedTuple):
    """Queries and keys of a tile, and how the loop over tiles is compiled."""

    m: int
    n: int
    warps: int
    stages: int


def choose_tiles(dtype: torch.dtype, d: int, capability: tuple[int, int]) -> PrefillTiles:
    """Return tiles measured on an H200, and smaller ones for GPUs with less shared memory."""
    if dtype.itemsize > 2:
        return PrefillTiles(64, 32, 8, 1)
    large = capability[0] == 9 or capability == (10, 0)
    if not large:
        return PrefillTiles(64, 64, 4, 2) if d <= 128 else PrefillTiles(64, 32, 4, 1)
    return PrefillTiles(128, 128, 8, 3) if d <= 128 else PrefillTiles(128, 64, 8, 2)


def is_supported_on_hopper(call: Call) -> bool:
    """Return whether `triton_hopper` supports a call on its device."""
    query = call.tokens.query
    return (
        query.is_cuda
        and call.sinks is None
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] in (64, 128, 256)
        and call.page_slots >= 16
    )


def attend(call: Call, tile: PrefillTiles | None = None) -> Tensor:
    """Compute the attention of `sparse.extend` on any GPU."""
    (query, key, value), chunk, pages, window, scale, sinks = call
    b, hq, n, d = query.shape
    h, s = key.shape[1:3]
    out = call.empty()
    if tile is None:
        on_gpu = query.is_cuda
        capability = torch.cuda.get_device_capability(query.device) if on_gpu else (0, 0)
        tile = choose_tiles(query.dtype, d, capability)
    _attend_kernel[(triton.cdiv(n, tile.m) * hq * b,)](
        query, key, value, out, pages.pages, pages.table,
        chunk.evicted.view(torch.uint8), chunk.edges, chunk.start, call.order(), sinks,
        query.stride()[:3], key.stride()[:3], value.stride()[:3], out.stride()[:3],
        h, hq // h, s, n, pages.table.shape[-1], s - chunk.kept, window, scale * LOG2_E.value,
        PAGE=call.page_slots, D=d, PADDED=max(16, triton.next_power_of_2(d)), EDGE=EDGE,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.m, BLOCK_N=tile.n, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
