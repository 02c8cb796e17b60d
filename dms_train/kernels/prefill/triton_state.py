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

from dms_train.kernels.decode.types import ALWAYS, NEVER, SIGNAL, Decisions
from dms_train.kernels.errors import KernelError
from dms_train.kernels.prefill.lists import EDGE, Pages, PrefillChunk, PrefillState, recent_tokens
from dms_train.kernels.prefill.triton_pack import write_edges

_NEVER, _ALWAYS, _SIGNAL = tl.constexpr(NEVER), tl.constexpr(ALWAYS), tl.constexpr(SIGNAL)
_TOKENS = 128  # tokens of a chunk that are counted at a time
_POSITIONS = 1024  # positions of a chunk that are read at a time
_EDGES = 128  # edges of a chunk that are planned at a time
_PLACES = 64  # pages of a program
_PAIRS = 2**13  # numbers compared or moved at a time


@triton.jit
def _marks(
    place, seen, ring_ptr, position_ptr, signal_ptr, signal_n, n, shift,
    RING: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Return whether tokens of a chunk are evicted; False for undecided tokens."""
    back = RECENT - place  # above 0 before the chunk
    token = seen - back
    noted = (back > 0) & (back <= RING) & (token >= 0)
    before = tl.load(ring_ptr + token % RING, mask=noted, other=0) % 2 == 1
    decides = place - RECENT + shift  # index in the chunk of the token that decides
    inside = (decides >= 0) & (decides < n)
    there = inside & (tl.load(position_ptr + decides, mask=inside, other=-1) >= 0)
    now = tl.load(signal_ptr + decides.to(tl.int64) * signal_n, mask=there, other=0) != 0
    return tl.where(there, now, before)


@triton.jit
def _real_tokens(position_ptr, n, TOKENS: tl.constexpr):
    """Count the tokens of a sequence without padding."""
    found = tl.zeros([TOKENS], tl.int32)
    for begin in range(0, n, TOKENS):
        at = begin + tl.arange(0, TOKENS)
        found += (tl.load(position_ptr + at, mask=at < n, other=-1) >= 0).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _recent_slots(
    ring_ptr, slot_ptr, length, seen,
    SOURCE: tl.constexpr, RING: tl.constexpr, RECENT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write the slots of the last tokens of a KV list in the order of their positions."""
    place = tl.arange(0, PADDED)
    back = RECENT - place
    there = (place < RECENT) & (seen >= back) & (back <= RING)
    if SOURCE == _NEVER:  # no token has ever moved
        slot = length - back
    else:
        slot = tl.load(ring_ptr + (seen - back) % RING, mask=there, other=0) // 2
    tl.store(slot_ptr + place, tl.where(there, slot, -1), mask=place < RECENT)


@triton.jit(
    do_not_specialize=["heads", "n", "shift", "signal_b", "signal_h", "signal_n"],
    do_not_specialize_on_alignment=["rows_ptr", "position_ptr", "signal_ptr"],
)
def _plan_kernel(
    length_ptr, ring_ptr, rows_ptr, position_ptr, signal_ptr,
    held_ptr, seen_ptr, slot_ptr, evicted_ptr, edges_ptr, after_ptr, start_ptr, stop_ptr,
    heads, n, shift, signal_b, signal_h, signal_n,
    SOURCE: tl.constexpr, RING: tl.constexpr, RECENT: tl.constexpr, PADDED: tl.constexpr,
    EDGE: tl.constexpr, COUNTED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Read the state of one KV list, and count which tokens of a chunk are kept."""
    kv_list = tl.program_id(0)
    b, h = kv_list // heads, kv_list % heads
    stored = tl.load(rows_ptr + b).to(tl.int64) * heads + h
    ring_ptr += stored * RING
    position_ptr += b.to(tl.int64) * n
    stop = RECENT + _real_tokens(position_ptr, n, TOKENS)
    if RECENT > 0:
        length = tl.load(length_ptr + stored)
        seen = tl.load(position_ptr).to(tl.int32)
        slot_ptr += kv_list.to(tl.int64) * RECENT
        _recent_slots(ring_ptr, slot_ptr, length, seen, SOURCE, RING, RECENT, PADDED)
    else:
        length = tl.full([], 0, tl.int32)
        seen = tl.full([], 0, tl.int32)
    dense = tl.minimum(seen, RING)
    start = RECENT - dense
    tl.store(held_ptr + kv_list, length)
    if h == 0:
        tl.store(seen_ptr + b, seen)
        tl.store(start_ptr + b, start)
        tl.store(stop_ptr + b, stop)
    s = RECENT + n
    blocks = tl.cdiv(s, EDGE)
    evicted_ptr += kv_list.to(tl.int64) * s
    edges_ptr += kv_list * (blocks + 1)
    if SOURCE == _SIGNAL:
        signal_ptr += b.to(tl.int64) * signal_b + h.to(tl.int64) * signal_h
    tokens = tl.arange(0, COUNTED)[:, None] * EDGE + tl.arange(0, EDGE)[None, :]
    count = length - dense
    for block in range(0, blocks, COUNTED):
        token = block * EDGE + tokens
        if SOURCE == _SIGNAL:
            marked = _marks(
                token, seen, ring_ptr, position_ptr, signal_ptr, signal_n, n, shift, RING, RECENT
            )
        else:
            marked = (token >= 0) & (SOURCE == _ALWAYS)
        tl.store(evicted_ptr + token, marked.to(tl.uint8), mask=token < s)
        stays = (token >= start) & (token < stop) & ((token >= stop - RING) | (marked == 0))
        count = write_edges(stays, count, edges_ptr, block, blocks, COUNTED)
    tl.store(edges_ptr + blocks, count)
    tl.store(after_ptr + kv_list, count)


@triton.jit(do_not_specialize=["heads", "s", "recent"], do_not_specialize_on_alignment=["rows_ptr"])
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


def plan_prompt(
    lengths: Tensor,
    ring: Tensor,
    rows: Tensor,
    position: Tensor,
    signal: Tensor | None,
    rule: Decisions,
    *,
    begins: bool,
) -> tuple[PrefillState, PrefillChunk]:
    """Read the state of some rows and plan a chunk; see `PrefillKernels.plan_prompt`."""
    if rule.source not in (NEVER, ALWAYS, SIGNAL) or (rule.source == SIGNAL) != (
        signal is not None
    ):
        raise KernelError(
            f"decisions about a prompt: source {rule.source} "
            f"{'without' if signal is None else 'with'} a signal; use NEVER or ALWAYS without, or "
            "SIGNAL with one"
        )
    position = position.contiguous()
    (b, n), h, size, device = position.shape, lengths.shape[1], ring.shape[-1], ring.device
    recent = 0 if begins else recent_tokens(size - 1)
    blocks = triton.cdiv(recent + n, EDGE)
    # separate allocations: Triton compiles another variant for addresses that 16 does not divide
    held, after = (lengths.new_empty(b, h) for _ in range(2))
    seen, start, stop = (lengths.new_empty(b) for _ in range(3))
    slots = None if begins else lengths.new_empty(b, h, recent)
    evicted = torch.empty(b, h, recent + n, dtype=torch.bool, device=device)
    edges = lengths.new_empty(b, h, blocks + 1)
    decided = None if signal is None else signal.view(torch.uint8)
    _plan_kernel[(b * h,)](
        lengths, ring, rows, position, decided,
        held, seen, slots, evicted.view(torch.uint8), edges, after, start, stop,
        h, n, rule.shift, *((0, 0, 0) if signal is None else signal.stride()),
        SOURCE=rule.source, RING=size, RECENT=recent, PADDED=triton.next_power_of_2(max(1, recent)),
        EDGE=EDGE, COUNTED=min(_EDGES, triton.next_power_of_2(blocks)), TOKENS=_POSITIONS,
        num_warps=8,
    )  # fmt: skip
    state = PrefillState(held, seen, evicted[..., :recent], slots)
    return state, PrefillChunk(evicted, edges, after, start, stop, kept=size)


def commit_prefill(
    chunk: PrefillChunk, before: PrefillState, *, ring: Tensor, rows: Tensor, evicts: bool
) -> Tensor:
    """Write the ring and count reads; see `PrefillKernels.commit_prefill`."""
    b, h, s = chunk.evicted.shape
    size = ring.shape[-1]
    reads = torch.empty(b, h, dtype=torch.int64, device=ring.device)
    _commit_kernel[(b * h,)](
        chunk.evicted.view(torch.uint8), chunk.edges, chunk.start, chunk.stop, before.lengths,
        before.seen, rows, ring, reads, h, s, chunk.edges.shape[-1], before.evicted.shape[-1],
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
