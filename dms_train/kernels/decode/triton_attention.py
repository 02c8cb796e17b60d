"""Attention of one query token per sequence over a paged cache, in one kernel.

The tiles of slots of all KV lists are concatenated and divided into equal parts, one per program,
which balances KV lists of unequal length. Every program computes its part from the lengths, which
are on the device only. If several programs share a KV list, the last one to finish merges their
results. `triton_tiles` attends to the tiles of one KV list.

Shape letters: b sequences, h KV heads, g query heads per KV head, d head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.triton_fetch import fetch
from dms_train.kernels.decode.triton_tiles import (
    LOWEST,
    attend_fp8_tiles,
    attend_tiles,
    halved_query,
)
from dms_train.kernels.decode.types import (
    AttentionTuning,
    AttentionWorkspace,
    PagedCache,
    SlotLogits,
)
from dms_train.kernels.launch import can_overlap

_LOG2E = tl.constexpr(1.4426950408889634)
_FEW_LISTS = 16  # KV lists of an evicting policy with which a program has few tiles


def default_tuning(d: int, itemsize: int, *, few_tiles: bool = False) -> AttentionTuning:
    """Return the tuning for a head size and bytes per channel: 16 KB of keys at a time.

    FP8 bytes are unpacked between load and product; programs of two warps hide that latency better
    than half as many programs of four.

    Args:
        d: Head size.
        itemsize: Bytes of a channel.
        few_tiles: Whether a program has few tiles. Then a third tile in flight gains nothing, and
            its memory keeps programs of the next kernels from starting.
    """
    tile = max(16, min(128, 2**14 // (triton.next_power_of_2(d) * itemsize)))
    if itemsize == 1:
        return AttentionTuning(tile, warps=2, stages=2, per_sm=4)
    return AttentionTuning(tile, stages=2 if few_tiles else 3)


def attention_workspace(
    query: Tensor, cache: PagedCache, tuning: AttentionTuning | None = None, *, evicts: bool = False
) -> AttentionWorkspace:
    """Allocate scratch memory; see `PagedAttention.attention_workspace`."""
    b, all_heads, d = query.shape
    heads = cache.lengths.shape[1]
    kv_lists, device = b * heads, query.device
    few_tiles = evicts and kv_lists <= _FEW_LISTS
    tuning = tuning or default_tuning(d, cache.pages.dtype.itemsize, few_tiles=few_tiles)
    units = 4
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    programs = units * tuning.per_sm
    slots, group = programs + kv_lists, all_heads // heads
    return AttentionWorkspace(
        parts=torch.empty(slots, group, d, device=device),
        weights=torch.empty(slots, 2, group, device=device),
        arrived=torch.zeros(kv_lists, dtype=torch.int32, device=device),
        programs=programs,
        tuning=tuning,
    )


@triton.jit
def _share(
    rows_ptr,
    length_ptr,
    kv_lists,
    heads,
    TILE: tl.constexpr,
    KV_LISTS: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Return this program's part of all tiles; with OVERLAP, wait for the previous kernel.

    Returns:
        First tile and end of the program; KV list of the first tile, and the first tile of that
        list; number of tiles; number of programs with tiles.
    """
    kv_list = tl.arange(0, KV_LISTS)
    inside = kv_list < kv_lists
    row = tl.load(rows_ptr + kv_list // heads, mask=inside, other=-1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    length = tl.load(
        length_ptr + row * heads + kv_list % heads, mask=row >= 0, other=0, cache_modifier=CACHE
    )
    tiles = tl.where(inside, tl.maximum(tl.cdiv(length, TILE), 1), 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    if WIDE:
        total = total.to(tl.int64)
    program = tl.program_id(0)
    busy = tl.minimum(tl.num_programs(0), total)
    begin = (program * total // busy).to(tl.int32)
    end = tl.minimum((program + 1) * total // busy, total).to(tl.int32)  # none for idle programs
    done = ends <= begin
    here = tl.sum(done.to(tl.int32), 0)
    return begin, end, here, tl.max(tl.where(done, ends, 0), 0), total, busy


@triton.jit
def _fetch_tile(
    rows_ptr,
    length_ptr,
    table_ptr,
    pages_ptr,
    kv_lists,
    heads,
    places,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KV_LISTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Fetch this program's first tile into the L2 cache while the previous kernel runs.

    That kernel may change a length by one and add a page, so that the guessed tile may be wrong.
    The numbers bypass the L1 cache, where old values would stay.
    """
    at, end, kv_list, first, _, _ = _share(
        rows_ptr, length_ptr, kv_lists, heads, TILE, KV_LISTS, WIDE, False, ".cg"
    )
    if at < end:
        row = tl.maximum(tl.load(rows_ptr + kv_list // heads), 0)
        list_index = (row * heads + kv_list % heads).to(tl.int64)
        size = tl.load(length_ptr + list_index, cache_modifier=".cg")
        slot = tl.minimum((at - first) * TILE + tl.arange(0, TILE), tl.maximum(size - 1, 0))
        table_at = table_ptr + list_index * places + slot // PAGE
        page = tl.load(table_at, cache_modifier=".cg").to(tl.int64)
        PER_LINE: tl.constexpr = 1024 // pages_ptr.dtype.element_ty.primitive_bitwidth
        for line in tl.static_range((WIDTH + PER_LINE - 1) // PER_LINE):
            key_ptr = pages_ptr + page * (2 * PAGE * WIDTH) + slot % PAGE * WIDTH + line * PER_LINE
            fetch(key_ptr)
            fetch(key_ptr + PAGE * WIDTH)


@triton.jit
def _add_sinks(weight, peak, sink_ptr, R: tl.constexpr, R_PAD: tl.constexpr):
    """Return the sums of weights [R_PAD] with the weights of the sinks of R heads."""
    member = tl.arange(0, R_PAD)
    sink = tl.load(sink_ptr + member, mask=member < R, other=float("-inf"))
    return weight + tl.exp2(sink.to(tl.float32) * _LOG2E - peak)


@triton.jit
def _merge(
    part_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    sink_ptr,
    count,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge `count` consecutive parts into the output of a KV list, [R, D]."""
    piece, member = tl.arange(0, CHUNK)[:, None], tl.arange(0, R_PAD)[None, :]
    channel = tl.arange(0, D_PAD)[None, None, :]
    peak = tl.full([R_PAD], LOWEST, tl.float32)
    total = tl.zeros([R_PAD, D_PAD], tl.float32)
    weight = tl.zeros([R_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        real = (start + piece < count) & (member < R)
        at = weight_ptr + (start + piece) * (2 * R) + member
        peaks = tl.load(at, mask=real, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(at + R, mask=real, other=0.0, cache_modifier=".cg")
        part_at = part_ptr + ((start + piece) * (R * D) + member * D)[:, :, None] + channel
        inside = real[:, :, None] & (channel < D)
        parts = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks, 0))
        factor, fade = tl.exp2(peaks - higher[None, :]), tl.exp2(peak - higher)
        total = total * fade[:, None] + tl.sum(parts * factor[:, :, None], 0)
        weight = weight * fade + tl.sum(weights * factor, 0)
        peak = higher
    if sink_ptr is not None:
        weight = _add_sinks(weight, peak, sink_ptr, R, R_PAD)
    if total_ptr is not None:
        each = tl.arange(0, R_PAD)
        tl.store(total_ptr + each, peak + tl.log2(weight), mask=each < R)
    output = tl.where(weight[:, None] > 0, total / weight[:, None], 0.0)
    within = tl.arange(0, R_PAD)[:, None] * D + tl.arange(0, D_PAD)[None, :]
    real = (tl.arange(0, R_PAD)[:, None] < R) & (tl.arange(0, D_PAD)[None, :] < D)
    tl.store(out_ptr + within, output.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _decode_kernel(
    query_ptr,
    pages_ptr,
    table_ptr,
    exponent_ptr,
    length_ptr,
    rows_ptr,
    out_ptr,
    part_ptr,
    weight_ptr,
    arrived_ptr,
    logit_ptr,
    total_ptr,
    heads_ptr,
    sink_ptr,
    scale,
    kv_lists,
    heads,
    places,
    logit_slots,
    KV_LISTS: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    QUANTISED: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:  # launched while the append kernel runs; the next kernel may be launched as well
        tl.extra.cuda.gdc_launch_dependents()
        _fetch_tile(
            rows_ptr, length_ptr, table_ptr, pages_ptr, kv_lists, heads, places,
            D // 2 if QUANTISED else D, PAGE, TILE, KV_LISTS, WIDE,
        )  # fmt: skip
    at, end, kv_list, first, total, busy = _share(
        rows_ptr, length_ptr, kv_lists, heads, TILE, KV_LISTS, WIDE, OVERLAP, ""
    )
    member, channel = tl.arange(0, R_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    real = (member < R) & (channel < D)
    while at < end:
        row = tl.load(rows_ptr + kv_list // heads)
        list_index = (row * heads + kv_list % heads).to(tl.int64)
        size = tl.load(length_ptr + list_index, mask=row >= 0, other=0)
        last = first + tl.maximum(tl.cdiv(size, TILE), 1)
        stop = tl.minimum(last, end)
        query_at = query_ptr + kv_list * (R * D) + member * D + channel
        list_ptr = table_ptr + list_index * places
        logit_at = None
        if logit_ptr is not None:
            logit_at = logit_ptr + kv_list.to(tl.int64) * (R * logit_slots)
        heads_at = None
        if heads_ptr is not None:
            heads_at = heads_ptr + list_index * places
        if QUANTISED:
            first_query, second_query, power = halved_query(query_at, real, R_PAD, D_PAD)
            sums, peak, weight = attend_fp8_tiles(
                first_query, second_query, pages_ptr, list_ptr, exponent_ptr + list_index * places,
                scale * power, logit_at, logit_slots, at - first, stop - first, size,
                R, R_PAD, D, D_PAD, PAGE, TILE, STAGES, ASM,
            )  # fmt: skip
        else:
            query = tl.load(query_at, mask=real, other=0.0)
            factor = tl.full([R_PAD], scale, tl.float32)
            sums, peak, weight = attend_tiles(
                query, pages_ptr, list_ptr, factor, logit_at, logit_slots, heads_at, at - first,
                stop - first, size, R, R_PAD, D, D_PAD, PAGE, TILE, STAGES,
            )  # fmt: skip
        out_at = out_ptr + kv_list * (R * D)
        within = member * D + channel
        sinks_at = None
        if sink_ptr is not None:
            sinks_at = sink_ptr + kv_list % heads * R
        if (at == first) & (stop == last):
            if sinks_at is not None:
                weight = _add_sinks(weight, peak, sinks_at, R, R_PAD)
            output = tl.where(weight[:, None] > 0, sums / weight[:, None], 0.0)
            tl.store(out_at + within, output.to(out_ptr.dtype.element_ty), mask=real)
            if total_ptr is not None:
                each = tl.arange(0, R_PAD)
                tl.store(total_ptr + kv_list * R + each, peak + tl.log2(weight), mask=each < R)
        else:
            # program + KV list grows by one from part to part, within a KV list and across
            part = (tl.program_id(0) + kv_list).to(tl.int64)
            tl.store(part_ptr + part * (R * D) + within, sums, mask=real)
            weight_at = weight_ptr + part * (2 * R) + tl.arange(0, R_PAD)
            tl.store(weight_at, peak, mask=tl.arange(0, R_PAD) < R)
            tl.store(weight_at + R, weight, mask=tl.arange(0, R_PAD) < R)
            tl.debug_barrier()  # the whole part is written before it is announced
            opener = ((first + 1) * busy - 1) // total
            count = ((last * busy - 1) // total - opener + 1).to(tl.int32)
            seen = tl.atomic_add(arrived_ptr + kv_list, 1, sem="acq_rel", scope="gpu")
            if seen == count - 1:
                part = (opener + kv_list).to(tl.int64)
                _merge(
                    part_ptr + part * (R * D),
                    weight_ptr + part * (2 * R),
                    out_at,
                    None if total_ptr is None else total_ptr + kv_list * R,
                    sinks_at,
                    count,
                    R,
                    MERGED,
                    D,
                    D_PAD,
                    CHUNK,
                )
                tl.store(arrived_ptr + kv_list, 0)
        at, first, kv_list = stop, last, kv_list + 1


def attend(
    query: Tensor,
    cache: PagedCache,
    rows: Tensor,
    scale: float,
    memory: AttentionWorkspace,
    output: Tensor | None = None,
    logits: SlotLogits | None = None,
    readers: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the live slots in one kernel; see `PagedAttention.attend`."""
    b, all_heads, d = query.shape
    h = cache.lengths.shape[1]
    group, tuning = all_heads // h, memory.tuning
    output = torch.empty_like(query) if output is None else output
    quantised = cache.exponents is not None
    flat = triton.next_power_of_2(group) * triton.next_power_of_2(d)
    tiles = b * h * cache.table.shape[-1] * cache.page_slots // tuning.tile
    _decode_kernel[(memory.programs,)](
        query,
        cache.pages.view(torch.int16) if quantised else cache.pages,
        cache.table,
        None if cache.exponents is None else cache.exponents.view(torch.int16),
        cache.lengths,
        rows,
        output,
        memory.parts,
        memory.weights,
        memory.arrived,
        None if logits is None else logits.logits,
        None if logits is None else logits.totals,
        readers,
        sinks,
        scale * _LOG2E.value,
        b * h,
        h,
        cache.table.shape[-1],
        0 if logits is None else logits.logits.shape[-1],
        KV_LISTS=triton.next_power_of_2(b * h),
        R=group,
        R_PAD=max(16, triton.next_power_of_2(group)),
        D=d,
        D_PAD=max(32 if quantised else 16, triton.next_power_of_2(d)),
        PAGE=cache.page_slots,
        TILE=tuning.tile,
        MERGED=triton.next_power_of_2(group),
        # parts combined at a time: each pass waits for memory, but many parts fill the registers
        CHUNK=max(1, min(triton.next_power_of_2(d) // 4, 2**12 * tuning.warps // flat)),
        WIDE=memory.programs * tiles >= 2**31,
        QUANTISED=quantised,
        ASM=query.device.type == "cuda",
        OVERLAP=can_overlap(query.device),
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        launch_pdl=can_overlap(query.device),
    )
    return output
