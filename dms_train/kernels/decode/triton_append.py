"""One kernel per layer that stores a new token in a paged cache: RoPE, decision, eviction, storage.

One program handles one (sequence, KV head). KV lists share the free list. They may share pages,
which are copied before they change. `reference` is the same in plain loops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.triton_pages import own_page
from dms_train.kernels.decode.types import (
    ALWAYS,
    CHOSEN,
    EVICTION_CHANNEL,
    FP8,
    LIST_FULL,
    NEVER,
    OUT_OF_PAGES,
    SIGNAL,
    Decisions,
    HeadNorms,
    PagedCache,
    Step,
)
from dms_train.kernels.launch import can_overlap

_NEVER, _ALWAYS = tl.constexpr(NEVER), tl.constexpr(ALWAYS)
_EVICTION_CHANNEL, _SIGNAL = tl.constexpr(EVICTION_CHANNEL), tl.constexpr(SIGNAL)
_CHOSEN = tl.constexpr(CHOSEN)
_OUT_OF_PAGES, _LIST_FULL = tl.constexpr(OUT_OF_PAGES), tl.constexpr(LIST_FULL)


@triton.jit
def _raised_exponent(
    page_ptr,
    held,
    first,
    second,
    fresh,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Raise the exponent of a page that gets a vector (two halves), and requantise the page.

    A page starts and is raised with one power of two to spare, so that raises are rare.
    """
    peak = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    need = (peak.to(tl.int32, bitcast=True) >> 23) - 134  # peak * 2**-need lies in [128, 256)
    need = tl.minimum(tl.maximum(need, -100), 100)
    used = tl.where(fresh | (need > held), need + 1, held)
    if (used > held) & (fresh == 0):
        slot, channel = tl.arange(0, PAGE)[:, None], tl.arange(0, D_PAD)[None, :]
        at = page_ptr + slot * D + channel
        inside = (channel < D) & (slot < PAGE)
        old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        new = old * tl.exp2((held - used).to(tl.float32))
        tl.store(at, new.to(page_ptr.dtype.element_ty), mask=inside)
    return used


@triton.jit
def _slot(
    leaving, time, length, bit, SOURCE: tl.constexpr, SHIFT: tl.constexpr, RING: tl.constexpr
):
    """Return the slot of the arriving token, and whether it is a new one.

    `leaving` is the ring entry of the token that leaves the window. `bit` is 1 for a decision to
    evict; it governs the leaving token if SHIFT is RING.
    """
    slot, grown = length, True
    if SOURCE != _NEVER:
        marked = leaving % 2
        if SHIFT == RING:
            marked = marked | bit
        evicts = (time >= RING) & (marked == 1)
        slot = tl.where(evicts, leaving // 2, length)
        grown = evicts == 0
    return slot, grown


@triton.jit
def _mark(entry_ptr, time, bit, SHIFT: tl.constexpr, RING: tl.constexpr):
    """Mark the governed token if it is in the ring; return the mark of the arriving token."""
    mark = 0
    if SHIFT == 0:
        mark = bit
    elif SHIFT < RING:
        governed_ptr = entry_ptr + (time + RING - SHIFT) % RING
        governed = tl.load(governed_ptr, mask=time >= SHIFT, other=0)
        tl.debug_barrier()
        tl.store(governed_ptr, governed | bit, mask=time >= SHIFT)
    return mark


@triton.jit
def _page_of(
    table_ptr, numbers_ptr, count_ptr, fault_ptr, holders_ptr, slot, grown, places,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Return the page of a slot, whether it is fresh, whether it exists, and its holders."""
    place, fresh = slot // PAGE, grown & (slot % PAGE == 0)
    stored = place < places
    page = tl.load(table_ptr + place, mask=stored & (fresh == 0), other=0)
    held = 1
    if holders_ptr is not None:
        held = tl.load(holders_ptr + page, mask=stored & (fresh == 0), other=1)
    if stored == 0:
        tl.atomic_or(fault_ptr, _LIST_FULL)
    elif fresh:
        left = tl.atomic_add(count_ptr, -1) - 1
        stored = left >= 0
        page = tl.load(numbers_ptr + left, mask=stored, other=0)
        tl.store(table_ptr + place, page, mask=stored)
        if left < 0:
            tl.atomic_or(fault_ptr, _OUT_OF_PAGES)
    return page, fresh, stored, held


@triton.jit
def _down_scales(
    pair_ptr,
    used_key,
    used_value,
    page_ptr,
    key_1,
    key_2,
    value_1,
    value_2,
    fresh,
    stored,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return factors that bring key and value into the range of a page; may raise its exponents."""
    if stored:
        used_key = _raised_exponent(page_ptr, used_key, key_1, key_2, fresh, D, D_PAD, PAGE)
        used_value = _raised_exponent(
            page_ptr + PAGE * D, used_value, value_1, value_2, fresh, D, D_PAD, PAGE
        )
        tl.debug_barrier()  # the old content of the slot is rewritten before the new one
        tl.store(pair_ptr, used_key.to(tl.int8))
        tl.store(pair_ptr + 1, used_value.to(tl.int8))
    return tl.exp2(-used_key.to(tl.float32)), tl.exp2(-used_value.to(tl.float32))


@triton.jit
def _widen_bounds(bounds_ptr, before, page, fresh, stored, key, half, D: tl.constexpr):
    """Widen the bounds of a page, formerly page `before`, to include half of a key."""
    inside = (half < D // 2) & stored
    known = bounds_ptr + before.to(tl.int64) * (2 * D) + half
    low = tl.load(known, mask=inside & (fresh == 0), other=float("inf"))
    high = tl.load(known + D, mask=inside & (fresh == 0), other=float("-inf"))
    own = bounds_ptr + page.to(tl.int64) * (2 * D) + half
    tl.store(own, tl.minimum(low, key), mask=inside)
    tl.store(own + D, tl.maximum(high, key), mask=inside)


@triton.jit
def _query_halves(query_ptr, half, R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr):
    """Load a query group as two halves of its channels, float32 [R_PAD, D_PAD / 2] each."""
    member = tl.arange(0, R_PAD)[:, None]
    real = (member < R) & (half < D // 2)[None, :]
    at = member * D + half[None, :]
    first = tl.load(query_ptr + at, mask=real, other=0.0)
    second = tl.load(query_ptr + at + D // 2, mask=real, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _normed_query(first, second, norm_ptr, epsilon, half, D: tl.constexpr):
    """Apply RMSNorm to query heads in two halves, [R_PAD, D_PAD / 2], rounded like the layer."""
    kind = norm_ptr.dtype.element_ty
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    factor = tl.rsqrt(squares / D + epsilon)[:, None]
    norm_1 = tl.load(norm_ptr + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
    norm_2 = tl.load(norm_ptr + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)
    first = (first * factor).to(kind).to(tl.float32) * norm_1
    second = (second * factor).to(kind).to(tl.float32) * norm_2[None, :]
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def _normed_key(first, second, norm_ptr, epsilon, half, D: tl.constexpr):
    """Apply RMSNorm to one key in two halves, [D_PAD / 2]."""
    first, second = _normed_query(first[None, :], second[None, :], norm_ptr, epsilon, half, D)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _eviction_channel(
    first, second, half, CHANNEL: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr
):
    """Return the eviction channel of the first query head."""
    member = tl.arange(0, R_PAD)[:, None]
    at = tl.where(CHANNEL < D // 2, CHANNEL, CHANNEL - D // 2)
    side = first if CHANNEL < D // 2 else second
    return tl.sum(tl.sum(tl.where((member == 0) & (half[None, :] == at), side, 0.0), 1), 0)


@triton.jit
def _rotate_query(
    first,
    second,
    rotated_ptr,
    cos,
    sin,
    half,
    CHANNEL: tl.constexpr,
    CLEAR: tl.constexpr,
    CLEAR_AFTER: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
):
    """Apply RoPE to a query group, without the eviction channel."""
    HALF: tl.constexpr = D // 2
    member = tl.arange(0, R_PAD)[:, None]
    real = (member < R) & (half < HALF)[None, :]
    at = member * D + half[None, :]
    cleared_1 = (member == 0) & (half[None, :] == CHANNEL)
    cleared_2 = (member == 0) & (half[None, :] + HALF == CHANNEL)
    if CLEAR:
        first = tl.where(cleared_1, 0.0, first)
        second = tl.where(cleared_2, 0.0, second)
    turned_1 = first * cos[None, :] - second * sin[None, :]
    turned_2 = second * cos[None, :] + first * sin[None, :]
    if CLEAR_AFTER:
        turned_1 = tl.where(cleared_1, 0.0, turned_1)
        turned_2 = tl.where(cleared_2, 0.0, turned_2)
    kind = rotated_ptr.dtype.element_ty
    tl.store(rotated_ptr + at, turned_1.to(kind), mask=real)
    tl.store(rotated_ptr + at + HALF, turned_2.to(kind), mask=real)


@triton.jit
def _append_kernel(
    query_ptr, key_ptr, value_ptr, signal_ptr, cos_ptr, sin_ptr, position_ptr, rows_ptr,
    rotated_ptr, pages_ptr, table_ptr, length_ptr, ring_ptr, exponent_ptr, numbers_ptr,
    count_ptr, fault_ptr, holders_ptr, positions_ptr, bounds_ptr, query_norm_ptr,
    key_norm_ptr, epsilon, query_stride, key_stride, value_stride, angle_stride, places, scale,
    offset,
    SOURCE: tl.constexpr, SHIFT: tl.constexpr, CHANNEL: tl.constexpr, CLEAR: tl.constexpr,
    CLEAR_AFTER: tl.constexpr, RING: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, QUANTISED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:  # launched while the previous kernel runs; the attention may be launched as well
        tl.extra.cuda.gdc_launch_dependents()
    batch, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + batch)
    if row < 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        return
    HALF: tl.constexpr = D // 2
    DECIDES: tl.constexpr = (SOURCE != _NEVER) and (SOURCE != _CHOSEN)
    LATE: tl.constexpr = DECIDES and (SOURCE != _ALWAYS) and (SHIFT == RING)
    half = tl.arange(0, D_PAD // 2)
    inside = half < HALF
    # no kernel since the previous step has written the KV list's state: read it without a wait
    kv_list = (row * heads + head).to(tl.int64)
    list_ptr = table_ptr + kv_list * places
    time = tl.load(position_ptr + batch)
    length = tl.load(length_ptr + kv_list)
    entry_ptr = ring_ptr + kv_list * RING
    leaving, bit = 0, 1
    if SOURCE != _NEVER:
        leaving = tl.load(entry_ptr + time % RING, mask=time >= RING, other=0)
    if not LATE:
        slot, grown = _slot(leaving, time, length, bit, SOURCE, SHIFT, RING)
        page, fresh, stored, held = _page_of(
            list_ptr, numbers_ptr, count_ptr, fault_ptr, holders_ptr, slot, grown, places, PAGE
        )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    cos = tl.load(cos_ptr + batch * angle_stride + half, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + batch * angle_stride + half, mask=inside, other=0.0).to(tl.float32)
    key_at = key_ptr + batch.to(tl.int64) * key_stride + head * D + half
    raw_1 = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
    raw_2 = tl.load(key_at + HALF, mask=inside, other=0.0).to(tl.float32)
    value_at = value_ptr + batch.to(tl.int64) * value_stride + head * D + half
    value_1 = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)
    value_2 = tl.load(value_at + HALF, mask=inside, other=0.0).to(tl.float32)
    query_base = query_ptr + batch.to(tl.int64) * query_stride + head * R * D
    first, second = _query_halves(query_base, half, R, R_PAD, D)
    if query_norm_ptr is not None:
        first, second = _normed_query(first, second, query_norm_ptr, epsilon, half, D)
        raw_1, raw_2 = _normed_key(raw_1, raw_2, key_norm_ptr, epsilon, half, D)
    if SOURCE == _EVICTION_CHANNEL:
        list_value = _eviction_channel(first, second, half, CHANNEL, R_PAD, D)
        bit = (list_value * scale - offset > 0).to(tl.int32)
    if SOURCE == _SIGNAL:
        bit = (tl.load(signal_ptr + batch * heads + head) != 0).to(tl.int32)
    if LATE:
        slot, grown = _slot(leaving, time, length, bit, SOURCE, SHIFT, RING)
        page, fresh, stored, held = _page_of(
            list_ptr, numbers_ptr, count_ptr, fault_ptr, holders_ptr, slot, grown, places, PAGE
        )
    rotated_at = rotated_ptr + (batch * heads + head).to(tl.int64) * R * D
    _rotate_query(
        first, second, rotated_at, cos, sin, half, CHANNEL, CLEAR, CLEAR_AFTER, R, R_PAD, D
    )
    place, before = slot // PAGE, page
    if QUANTISED:
        pair_ptr = exponent_ptr + (kv_list * places + place) * 2
        used_key = tl.load(pair_ptr, mask=place < places, other=0).to(tl.int32)
        used_value = tl.load(pair_ptr + 1, mask=place < places, other=0).to(tl.int32)
    if holders_ptr is not None:
        page, stored = own_page(
            list_ptr, pages_ptr, numbers_ptr, count_ptr, fault_ptr,
            holders_ptr, place, page, held, stored, 2 * PAGE * D, 512,
        )  # fmt: skip
    entry = slot * 2
    if DECIDES:
        entry += _mark(entry_ptr, time, bit, SHIFT, RING)
    tl.debug_barrier()  # every warp has read the KV list's state
    tl.store(length_ptr + kv_list, length + 1, mask=stored & grown)
    if SOURCE != _NEVER:
        tl.store(entry_ptr + time % RING, entry, mask=stored)
    if positions_ptr is not None:
        tl.store(positions_ptr + kv_list * (places * PAGE) + slot, time.to(tl.int32), mask=stored)
    key_1, key_2 = raw_1 * cos - raw_2 * sin, raw_2 * cos + raw_1 * sin
    page_at = pages_ptr + page.to(tl.int64) * (2 * PAGE * D)
    if QUANTISED:
        down_key, down_value = _down_scales(
            pair_ptr, used_key, used_value, page_at, key_1, key_2, value_1, value_2, fresh, stored,
            D, D_PAD, PAGE,
        )  # fmt: skip
        key_1, key_2 = key_1 * down_key, key_2 * down_key
        value_1, value_2 = value_1 * down_value, value_2 * down_value
    kind = pages_ptr.dtype.element_ty
    if bounds_ptr is not None:
        _widen_bounds(bounds_ptr, before, page, fresh, stored, key_1.to(kind), half, D)
        _widen_bounds(bounds_ptr + HALF, before, page, fresh, stored, key_2.to(kind), half, D)
    slot_at = page_at + (slot % PAGE) * D + half
    write = inside & stored
    tl.store(slot_at, key_1.to(kind), mask=write)
    tl.store(slot_at + HALF, key_2.to(kind), mask=write)
    tl.store(slot_at + PAGE * D, value_1.to(kind), mask=write)
    tl.store(slot_at + PAGE * D + HALF, value_2.to(kind), mask=write)


def append(
    step: Step,
    cache: PagedCache,
    rule: Decisions,
    *,
    norms: HeadNorms | None = None,
    rotated: Tensor | None = None,
) -> Tensor:
    """Evict and store one token per sequence in one kernel; see `PagedAttention.append`."""
    b, heads, d = step.query.shape
    h = step.key.shape[1]
    overlap = can_overlap(step.query.device)
    if rotated is None:
        rotated = torch.empty_like(step.query, memory_format=torch.contiguous_format)
    _append_kernel[(b, h)](
        step.query,
        step.key,
        step.value,
        step.signal,
        step.cos,
        step.sin,
        step.position,
        step.rows,
        rotated,
        cache.pages,
        cache.table,
        cache.lengths,
        cache.ring,
        cache.exponents,
        cache.free.numbers,
        cache.free.left,
        cache.free.fault,
        cache.free.holders,
        cache.positions,
        cache.bounds,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        step.query.stride(0),
        step.key.stride(0),
        step.value.stride(0),
        step.cos.stride(0),
        cache.table.shape[-1],
        rule.scale,
        rule.offset,
        SOURCE=rule.source,
        SHIFT=rule.shift,
        CHANNEL=rule.channel,
        CLEAR=rule.clear,
        CLEAR_AFTER=rule.clear_after_rope,
        RING=cache.ring.shape[-1],
        R=heads // h,
        R_PAD=triton.next_power_of_2(heads // h),
        D=d,
        D_PAD=triton.next_power_of_2(d),
        PAGE=cache.page_slots,
        QUANTISED=cache.pages.dtype == FP8,
        OVERLAP=overlap,
        num_warps=1,  # others release pages meanwhile; warps could see different holders
        launch_pdl=overlap,
    )
    return rotated
