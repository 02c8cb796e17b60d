"""Copy the kept tokens of a chunk contiguously into the pages of their KV head.

Shapes: see `lists`. A KV list is one (sequence, KV head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.prefill.lists import EDGE, Pages, PrefillChunk

# Edges that one step of the counting kernel handles.
_COUNTED = 128


@triton.jit
def _survives(evicted, tokens, start, stop, kept, s):
    """Return which tokens of a KV list are kept; `evicted` points to the first one."""
    real = (tokens >= start) & (tokens < stop)
    marked = tl.load(evicted + tokens, mask=tokens < s, other=1) != 0
    return real & ((tokens >= stop - kept) | (marked == 0))


@triton.jit
def write_edges(stays, count, edges, block, blocks, COUNTED: tl.constexpr):
    """Write the lengths of a KV list before COUNTED edges; return the length after them.

    `stays` [COUNTED, EDGE] marks the kept tokens, and `count` is the length before the first edge.
    """
    places = block + tl.arange(0, COUNTED)
    kept = tl.sum(stays.to(tl.int32), 1)
    tl.store(edges + places, count + tl.cumsum(kept, 0) - kept, mask=places < blocks)
    return count + tl.sum(kept, 0)


@triton.jit(do_not_specialize=["heads", "s", "kept"])
def _count_kernel(
    evicted, before, edges, after, start, stop, heads, s, kept,
    EDGE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Count the kept tokens at the edges of one KV list."""
    kv_list = tl.program_id(0)
    first = tl.load(start + kv_list // heads)
    last = tl.load(stop + kv_list // heads)
    count = tl.load(before + kv_list)
    blocks = tl.cdiv(s, EDGE)
    tokens = tl.arange(0, COUNTED)[:, None] * EDGE + tl.arange(0, EDGE)[None, :]
    list_evicted = evicted + kv_list.to(tl.int64) * s
    list_edges = edges + kv_list * (blocks + 1)
    for block in range(0, blocks, COUNTED):
        stays = _survives(list_evicted, block * EDGE + tokens, first, last, kept, s)
        count = write_edges(stays, count, list_edges, block, blocks, COUNTED)
    tl.store(list_edges + blocks, count)
    tl.store(after + kv_list, count)


@triton.jit
def _copy_rows(
    source, stride, tokens, stays, pages, table, slots, used, half,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy kept tokens to the key or value half of the used slots; other used slots become 0."""
    channels = tl.arange(0, PADDED)
    real = channels < D
    page = tl.load(table + slots // PAGE, mask=used, other=0).to(tl.int64) * 2 + half
    values = tl.load(
        source + tokens.to(tl.int64)[:, None] * stride + channels,
        mask=stays[:, None] & real,
        other=0.0,
    )
    at = pages + (page * PAGE + slots % PAGE)[:, None] * D + channels
    tl.store(at, values, mask=used[:, None] & real)


@triton.jit(do_not_specialize=["heads", "s", "places", "kept"])
def _pack_kernel(
    key, value, pages, table, evicted, edges, start, stop, key_strides, value_strides,
    heads, s, places, kept,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Copy the kept tokens of a block; the block after the last clears the end of a page."""
    block = tl.program_id(0)
    kv_list = tl.program_id(1)
    b, h = kv_list // heads, kv_list % heads
    blocks = tl.cdiv(s, EDGE)
    count = tl.load(edges + kv_list * (blocks + 1) + block)
    table += kv_list * places
    here = tl.arange(0, EDGE)
    value += b.to(tl.int64) * value_strides[0] + h * value_strides[1]
    if block < blocks:
        tokens = block * EDGE + here
        first, last = tl.load(start + b), tl.load(stop + b)
        stays = _survives(evicted + kv_list.to(tl.int64) * s, tokens, first, last, kept, s)
        slots = count + tl.cumsum(stays.to(tl.int32), 0) - 1
        key += b.to(tl.int64) * key_strides[0] + h * key_strides[1]
        _copy_rows(key, key_strides[2], tokens, stays, pages, table, slots, stays, 0,
                   PAGE, D, PADDED)  # fmt: skip
        _copy_rows(value, value_strides[2], tokens, stays, pages, table, slots, stays, 1,
                   PAGE, D, PADDED)  # fmt: skip
    else:
        end = tl.cdiv(count, PAGE) * PAGE
        for slot in range(count, end, EDGE):
            slots = slot + here
            _copy_rows(value, 0, here, here < 0, pages, table, slots, slots < end, 1,
                       PAGE, D, PADDED)  # fmt: skip


@triton.jit(do_not_specialize=["heads", "recent", "n", "places"])
def _join_kernel(
    key, value, pages, table, slots, new_key, new_value, key_strides, value_strides,
    heads, recent, n, places,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy slots of a KV list, and then new tokens, to dense rows; slots below 0 read 0."""
    kv_list = tl.program_id(1)
    b, h = kv_list // heads, kv_list % heads
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, PADDED)
    inside = channels < D
    slot = tl.load(slots + kv_list * recent + here, mask=here < recent, other=-1)
    used = (slot >= 0)[:, None] & inside
    page = tl.load(table + kv_list * places + slot // PAGE, mask=slot >= 0, other=0).to(tl.int64)
    at = pages + (page * (2 * PAGE) + slot % PAGE)[:, None] * D + channels
    k, v = tl.load(at, mask=used, other=0.0), tl.load(at + PAGE * D, mask=used, other=0.0)
    token = (here - recent).to(tl.int64)[:, None]
    arrives = ((here >= recent) & (here < recent + n))[:, None] & inside
    new_key += b.to(tl.int64) * key_strides[0] + h * key_strides[1]
    new_value += b.to(tl.int64) * value_strides[0] + h * value_strides[1]
    k += tl.load(new_key + token * key_strides[2] + channels, mask=arrives, other=0.0)
    v += tl.load(new_value + token * value_strides[2] + channels, mask=arrives, other=0.0)
    row = (kv_list.to(tl.int64) * (recent + n) + here)[:, None] * D + channels
    real = (here < recent + n)[:, None] & inside
    tl.store(key + row, k, mask=real)
    tl.store(value + row, v, mask=real)


def count_survivors(
    evicted: Tensor, before: Tensor, kept: int, start: Tensor, stop: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the edges and lengths of a chunk; see `PrefillChunk`."""
    b, h, s = evicted.shape
    blocks = triton.cdiv(s, EDGE)
    edges = before.new_empty(b, h, blocks + 1)
    after = torch.empty_like(before)
    counted = min(_COUNTED, triton.next_power_of_2(blocks))
    _count_kernel[(b * h,)](
        evicted.view(torch.uint8), before, edges, after, start, stop, h, s, kept,
        EDGE=EDGE, COUNTED=counted, num_warps=8,
    )  # fmt: skip
    return edges, after


def pack_survivors(key: Tensor, value: Tensor, chunk: PrefillChunk, pages: Pages) -> None:
    """Append the kept tokens of a chunk to each KV list, in the order of their positions.

    Values after the end of the list become 0 up to the end of its last page, because a kernel may
    multiply them by 0.

    Args:
        key: [b, h, s, d]; d lies densely.
        value: [b, h, s, d].
        chunk: Kept tokens.
        pages: Pages with enough slots for the lists.
    """
    b, h, s, d = key.shape
    grid = (triton.cdiv(s, EDGE) + 1, b * h)
    _pack_kernel[grid](
        key, value, pages.pages, pages.table, chunk.evicted.view(torch.uint8), chunk.edges,
        chunk.start, chunk.stop, key.stride()[:3], value.stride()[:3],
        h, s, pages.table.shape[-1], chunk.kept,
        PAGE=pages.pages.shape[2], D=d, PADDED=triton.next_power_of_2(d), EDGE=EDGE, num_warps=4,
    )  # fmt: skip


def join_tokens(pages: Pages, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put the tokens of slots before new tokens.

    Args:
        pages: Pages of the lists.
        slots: int32 [b, h, k]; slots below 0 read 0.
        key: [b, h, n, d]; d lies densely.
        value: [b, h, n, d].

    Returns:
        Key and value, [b, h, k + n, d] each.
    """
    b, h, n, d = key.shape
    recent = slots.shape[2]
    whole_key, whole_value = pages.pages.new_empty(2, b, h, recent + n, d)
    _join_kernel[(triton.cdiv(recent + n, EDGE), b * h)](
        whole_key, whole_value, pages.pages, pages.table, slots.contiguous(), key, value,
        key.stride()[:3], value.stride()[:3], h, recent, n, pages.table.shape[-1],
        PAGE=pages.pages.shape[2], D=d, PADDED=triton.next_power_of_2(d), BLOCK=EDGE,
    )  # fmt: skip
    return whole_key, whole_value
