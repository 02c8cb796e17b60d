"""State of a paged cache before and after a chunk of prompts.

One program handles one KV list, or some of its pages. Each of these functions would be a dozen
small operations in torch.

Shape letters: b sequences, h KV heads, r cache rows, k recent tokens that a chunk includes,
s tokens of a chunk with the recent ones before it, p pages of the longest list, w window.
A KV list is one (sequence, KV head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.prefill.lists import Pages, PrefillChunk

_TOKENS = 128  # tokens of a chunk that are counted at a time
_PLACES = 64  # pages of a program
_PAIRS = 2**13  # numbers compared or moved at a time


@triton.jit(do_not_specialize=["heads"])
def _recent_kernel(
    length_ptr, ring_ptr, rows_ptr, seen_ptr, length_out, evicted_ptr, slot_ptr, heads,
    RING: tl.constexpr, RECENT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Read the ring of one KV list in the order of positions."""
    kv_list = tl.program_id(0)
    b = kv_list // heads
    stored = tl.load(rows_ptr + b).to(tl.int64) * heads + kv_list % heads
    tl.store(length_out + kv_list, tl.load(length_ptr + stored))
    place = tl.arange(0, PADDED)
    back = RECENT - place
    token = tl.load(seen_ptr + b) - back
    held = (place < RECENT) & (token >= 0) & (back <= RING)
    entry = tl.load(ring_ptr + stored * RING + token % RING, mask=held, other=0)
    at = kv_list.to(tl.int64) * RECENT + place
    tl.store(slot_ptr + at, tl.where(held, entry // 2, -1), mask=place < RECENT)
    tl.store(evicted_ptr + at, (entry % 2).to(tl.uint8), mask=place < RECENT)


@triton.jit(do_not_specialize=["heads", "s", "recent"])
def _commit_kernel(
    evicted_ptr, edges_ptr, start_ptr, stop_ptr, length_ptr, seen_ptr, rows_ptr, ring_ptr,
    read_ptr, heads, s, edges, recent,
    RING: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, EVICTS: tl.constexpr,
):  # fmt: skip
    """Count what the queries of one KV list read, and write its ring."""
    kv_list = tl.program_id(0)
    b = kv_list // heads
    first, stop = tl.load(start_ptr + b), tl.load(stop_ptr + b)
    seen = tl.load(seen_ptr + b)
    evicted_ptr += kv_list.to(tl.int64) * s
    if EVICTS:
        counts = tl.zeros([TOKENS], tl.int64)
        for begin in range(0, s, TOKENS):
            token = begin + tl.arange(0, TOKENS)
            marked = tl.load(evicted_ptr + token, mask=token < s, other=0) != 0
            last = tl.where(marked, tl.minimum(stop, token + RING), stop)
            queries = tl.maximum(last - tl.maximum(token, recent), 0)
            counts += tl.where((token >= first) & (token < stop), queries, 0)
        reads = tl.sum(counts, 0)
    else:  # a query reads all tokens up to itself
        own = tl.maximum(stop - recent, 0).to(tl.int64)
        reads = (recent - first) * own + own * (own + 1) // 2
    older = tl.load(length_ptr + kv_list) - tl.minimum(seen, RING)
    older_reads = older.to(tl.int64) * (stop - recent)
    tl.store(read_ptr + kv_list, reads + older_reads)
    if EVICTS:
        stored = tl.load(rows_ptr + b).to(tl.int64) * heads + kv_list % heads
        length = tl.load(edges_ptr + kv_list * edges + edges - 1)
        entry = tl.arange(0, PADDED)
        seen += stop - recent
        back = (seen - 1 - entry + RING) % RING + 1  # 1 for the newest token
        there = (entry < RING) & (back <= seen)
        mark = tl.load(evicted_ptr + stop - back, mask=there, other=0) != 0
        found = tl.where(there, 2 * (length - back) + mark.to(tl.int32), 0)
        tl.store(ring_ptr + stored * RING + entry, found, mask=entry < RING)


@triton.jit(do_not_specialize=["places"])
def _changed_kernel(
    length_ptr, slot_ptr, changed_ptr, places,
    RECENT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Mark the pages of a KV list with a recent token, and the pages after the older tokens."""
    kv_list = tl.program_id(0)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    found = tl.zeros([PLACES], tl.int32)
    older = tl.load(length_ptr + kv_list)
    for begin in range(0, RECENT, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        slot = tl.load(slot_ptr + kv_list.to(tl.int64) * RECENT + at, mask=at < RECENT, other=-1)
        held = slot >= 0
        older -= tl.sum(held.to(tl.int32), 0)
        here = held[:, None] & ((slot // PAGE)[:, None] == place[None, :])
        found = tl.maximum(found, tl.max(here.to(tl.int32), 0))
    changed = (found > 0) | (place >= older // PAGE)
    at = kv_list.to(tl.int64) * places + place
    tl.store(changed_ptr + at, changed.to(tl.uint8), mask=place < places)


@triton.jit(do_not_specialize=["places"])
def _gaps_kernel(
    pages_ptr, table_ptr, length_ptr, slot_ptr, places,
    RECENT: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    TAILS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Move the last tokens of a KV list into the slots of evicted tokens."""
    kv_list = tl.program_id(0)
    table_ptr += kv_list.to(tl.int64) * places
    place = tl.arange(0, PADDED)
    at = kv_list.to(tl.int64) * RECENT + place
    slot = tl.load(slot_ptr + at, mask=place < RECENT, other=-1)
    gone = tl.sum((slot >= 0).to(tl.int32), 0)
    cut = tl.load(length_ptr + kv_list) - gone  # length afterwards
    hole = (slot >= 0) & (slot < cut)
    if tl.max(hole.to(tl.int32), 0) > 0:
        # the number of moved tokens equals the number of holes; both are taken in order
        number = tl.cumsum(hole.to(tl.int32), 0) - 1
        source = tl.zeros([PADDED], tl.int32)
        moved = tl.zeros([1], tl.int32)
        for begin in range(0, gone, TAILS):
            tail = begin + tl.arange(0, TAILS)
            leaves = tl.max((slot[:, None] == (cut + tail)[None, :]).to(tl.int32), 0)
            moves = ((tail < gone) & (leaves == 0)).to(tl.int32)
            rank = moved + tl.cumsum(moves, 0) - 1
            fits = hole[:, None] & (moves > 0)[None, :] & (number[:, None] == rank[None, :])
            source += tl.sum(tl.where(fits, (cut + tail)[None, :], 0), 1)
            moved += tl.sum(moves, 0)
        page = tl.load(table_ptr + source // PAGE, mask=hole, other=0).to(tl.int64)
        from_row = page * (2 * PAGE) + source % PAGE
        page = tl.load(table_ptr + slot // PAGE, mask=hole, other=0).to(tl.int64)
        to_row = page * (2 * PAGE) + slot % PAGE
        for begin in range(0, D, CHANNELS):
            channel = begin + tl.arange(0, CHANNELS)
            inside = hole[:, None] & (channel < D)[None, :]
            old = pages_ptr + from_row[:, None] * D + channel[None, :]
            new = pages_ptr + to_row[:, None] * D + channel[None, :]
            tl.store(new, tl.load(old, mask=inside), mask=inside)
            tl.store(new + PAGE * D, tl.load(old + PAGE * D, mask=inside), mask=inside)


def read_ring(
    lengths: Tensor, ring: Tensor, rows: Tensor, seen: Tensor, recent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Read the recent tokens from a ring; see `PrefillKernels.read_ring`."""
    b, h, size = len(rows), lengths.shape[1], ring.shape[-1]
    row_lengths = lengths.new_empty(b, h)
    evicted = torch.empty(b, h, recent, dtype=torch.bool, device=ring.device)
    slots = lengths.new_empty(b, h, recent)
    _recent_kernel[(b * h,)](
        lengths, ring, rows, seen, row_lengths, evicted.view(torch.uint8), slots, h,
        RING=size, RECENT=recent, PADDED=triton.next_power_of_2(recent), num_warps=4,
    )  # fmt: skip
    return row_lengths, evicted, slots


def commit_prefill(
    chunk: PrefillChunk,
    lengths: Tensor,
    seen: Tensor,
    *,
    recent: int,
    ring: Tensor,
    rows: Tensor,
    evicts: bool,
) -> Tensor:
    """Write the ring and count reads; see `PrefillKernels.commit_prefill`."""
    b, h, s = chunk.evicted.shape
    size = ring.shape[-1]
    reads = torch.empty(b, h, dtype=torch.int64, device=ring.device)
    _commit_kernel[(b * h,)](
        chunk.evicted.view(torch.uint8), chunk.edges, chunk.start, chunk.stop, lengths, seen, rows,
        ring, reads, h, s, chunk.edges.shape[-1], recent,
        RING=size, PADDED=triton.next_power_of_2(size), TOKENS=_TOKENS, EVICTS=evicts, num_warps=4,
    )  # fmt: skip
    return reads


def changed_pages(lengths: Tensor, slots: Tensor, places: int, page_slots: int) -> Tensor:
    """Find the pages that a chunk writes to; see `PrefillKernels.changed_pages`."""
    b, h, recent = slots.shape
    changed = torch.empty(b, h, places, dtype=torch.bool, device=slots.device)
    _changed_kernel[(b * h, triton.cdiv(places, _PLACES))](
        lengths.contiguous(), slots, changed.view(torch.uint8), places,
        RECENT=recent, BLOCK=_PAIRS // _PLACES, PAGE=page_slots, PLACES=_PLACES, num_warps=4,
    )  # fmt: skip
    return changed


def close_gaps(pages: Pages, lengths: Tensor, leaving: Tensor) -> None:
    """Move the last tokens of each list into the slots of evicted tokens.

    Args:
        pages: Pages of the lists; tokens are moved in place.
        lengths: int32 [b, h], before.
        leaving: int32 [b, h, k], slots of evicted tokens, all different, -1 for none.
    """
    b, h, recent = leaving.shape
    padded = triton.next_power_of_2(recent)
    _gaps_kernel[(b * h,)](
        pages.pages, pages.table, lengths.contiguous(), leaving.contiguous(),
        pages.table.shape[-1],
        RECENT=recent, PADDED=padded, PAGE=pages.pages.shape[2], D=pages.pages.shape[-1],
        TAILS=_width(padded), CHANNELS=_width(padded), num_warps=8,
    )  # fmt: skip


def _width(height: int) -> int:
    """Return the number of columns of a block with this many rows."""
    return min(16, max(2, _PAIRS // height))
