"""One query token per sequence over the live slots of a paged cache, in one kernel.

The tiles of slots of all KV lists are concatenated and divided into as many equal parts as there
are programs, so KV lists of unequal length are balanced. Every program computes its part from the
lengths, which are on the device only. If several programs share a KV list, the one that finishes
last merges their results.

Shape letters: b sequences, h KV heads, g query heads per KV head, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.kernels import overlaps
from dms_train.kernels.decode.paged import PagedCache

_LOG2E = 1.4426950408889634
_LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite, so that differences are numbers


class Tuning(NamedTuple):
    """How the kernel is cut.

    Attributes:
        tile: Slots that are loaded at a time, a power of two.
        warps: Warps of a program.
        stages: Tiles on their way at the same time.
        per_sm: Programs of a multiprocessor.
        registers: Most registers of a thread; None for no limit.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 2
    registers: int | None = None


class SlotLogits(NamedTuple):
    """What a step gives to each slot, from which its weights follow: 2 ** (logit - total).

    Attributes:
        logits: float32 [b * h, g, at least the longest KV list], scores by base-2 logarithms.
        totals: float32 [b * h, g], logarithm of the sum of their powers of two.
    """

    logits: Tensor
    totals: Tensor


class Workspace(NamedTuple):
    """Memory of one step, reused by all layers; fixed addresses for CUDA graphs.

    Attributes:
        parts: float32 [programs + b * h, g, d], sums of values not yet divided.
        weights: float32 [programs + b * h, 2, g], peak score and sum of weights of each part.
        arrived: int32 [b * h], parts that are finished; 0 between launches.
        programs: Programs to launch.
        tuning: Rest of the launch.
    """

    parts: Tensor
    weights: Tensor
    arrived: Tensor
    programs: int
    tuning: Tuning


def default_tuning(d: int, itemsize: int) -> Tuning:
    """Tuning for a head size and bytes per channel of the cache: 16 KB of keys at a time.

    FP8 bytes are unpacked between load and product; programs of two warps hide that latency better
    than half as many programs of four.
    """
    tile = max(16, min(128, 2**14 // (triton.next_power_of_2(d) * itemsize)))
    return Tuning(tile, warps=2, stages=2, per_sm=4) if itemsize == 1 else Tuning(tile)


def workspace(query: Tensor, cache: PagedCache, tuning: Tuning | None = None) -> Workspace:
    """Workspace for queries like [b, h * g, d]."""
    b, all_heads, d = query.shape
    heads = cache.lengths.shape[1]
    kv_lists, device = b * heads, query.device
    tuning = tuning or default_tuning(d, cache.pages.dtype.itemsize)
    units = 4
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    programs = units * tuning.per_sm
    slots, group = programs + kv_lists, all_heads // heads
    return Workspace(
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
):
    """This program's part of all tiles; waits for the kernel before.

    Returns:
        Its first tile, its end, the KV list of its first tile, that KV list's first tile, the
        number of tiles and the number of programs that have any.
    """
    kv_list = tl.arange(0, KV_LISTS)
    inside = kv_list < kv_lists
    row = tl.load(rows_ptr + kv_list // heads, mask=inside, other=-1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    length = tl.load(length_ptr + row * heads + kv_list % heads, mask=row >= 0, other=0)
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
def _merge(
    part_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    count,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Output of a KV list, [R, D], from `count` parts that follow each other."""
    piece, member = tl.arange(0, CHUNK)[:, None], tl.arange(0, R_PAD)[None, :]
    channel = tl.arange(0, D_PAD)[None, None, :]
    peak = tl.full([R_PAD], _LOWEST, tl.float32)
    total = tl.zeros([R_PAD, D_PAD], tl.float32)
    weight = tl.zeros([R_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        real = (start + piece < count) & (member < R)
        at = weight_ptr + (start + piece) * (2 * R) + member
        peaks = tl.load(at, mask=real, other=_LOWEST, cache_modifier=".cg")
        weights = tl.load(at + R, mask=real, other=0.0, cache_modifier=".cg")
        part_at = part_ptr + ((start + piece) * (R * D) + member * D)[:, :, None] + channel
        inside = real[:, :, None] & (channel < D)
        parts = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks, 0))
        factor, fade = tl.exp2(peaks - higher[None, :]), tl.exp2(peak - higher)
        total = total * fade[:, None] + tl.sum(parts * factor[:, :, None], 0)
        weight = weight * fade + tl.sum(weights * factor, 0)
        peak = higher
    if total_ptr is not None:
        each = tl.arange(0, R_PAD)
        tl.store(total_ptr + each, peak + tl.log2(weight), mask=each < R)
    output = tl.where(weight[:, None] > 0, total / weight[:, None], 0.0)
    within = tl.arange(0, R_PAD)[:, None] * D + tl.arange(0, D_PAD)[None, :]
    real = (tl.arange(0, R_PAD)[:, None] < R) & (tl.arange(0, D_PAD)[None, :] < D)
    tl.store(out_ptr + within, output.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _first_of(pairs, ASM: tl.constexpr):
    """float16 of the first of two neighbouring e4m3 channels that lie in an int16."""
    if ASM:  # two pairs at a time, which the compiler would split
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 picked;
            .reg .b16 low, high;
            prmt.b32 picked, $1, 0, 0x4420;
            mov.b32 {low, high}, picked;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }""",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _second_of(pairs, ASM: tl.constexpr):
    """float16 of the second one."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 picked;
            .reg .b16 low, high;
            prmt.b32 picked, $1, 0, 0x4431;
            mov.b32 {low, high}, picked;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }""",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _power(exponent):
    """2**exponent of int32 in -126 .. 127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_logits(logit_ptr, logit_slots, scores, slot, size, R: tl.constexpr, R_PAD: tl.constexpr):
    """Scores of a tile, [R_PAD, TILE], by query head and slot."""
    member = tl.arange(0, R_PAD)[:, None]
    inside = (member < R) & (slot < tl.minimum(size, logit_slots))[None, :]
    tl.store(logit_ptr + member * logit_slots + slot[None, :], scores, mask=inside)


@triton.jit
def _attend_tiles(
    query,
    pages_ptr,
    list_ptr,
    factor,
    logit_ptr,
    logit_slots,
    heads_ptr,
    begin,
    end,
    size,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of query [R_PAD, D_PAD] to tiles begin .. end - 1 of a KV list with `size` slots.

    Scores are in powers of two; `factor` [R_PAD] multiplies q k.

    Returns:
        Sum of weighted values [R_PAD, D_PAD], peak score [R_PAD], sum of weights [R_PAD].
    """
    inner = tl.arange(0, TILE)
    channel = tl.arange(0, D_PAD)[None, :]
    sums = tl.zeros([R_PAD, D_PAD], tl.float32)
    peak = tl.full([R_PAD], _LOWEST, tl.float32)
    weight = tl.zeros([R_PAD], tl.float32)
    # page numbers are read one tile ahead, so that no load waits for another
    slot = begin * TILE + inner
    page = tl.load(list_ptr + slot // PAGE, mask=slot < size, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        slot = tile * TILE + inner
        inside = (slot < size)[:, None]
        if D < D_PAD:
            inside = inside & (channel < D)
        key_ptr = pages_ptr + (page.to(tl.int64) * (2 * PAGE * D) + (slot % PAGE) * D)[:, None]
        if heads_ptr is not None:
            readers = tl.load(heads_ptr + slot // PAGE, mask=slot < size, other=0)
        page = tl.load(list_ptr + (slot + TILE) // PAGE, mask=slot + TILE < size, other=0)
        key = tl.load(key_ptr + channel, mask=inside, other=0.0)
        value = tl.load(key_ptr + PAGE * D + channel, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * factor[:, None]
        if logit_ptr is not None:
            _store_logits(logit_ptr, logit_slots, scores, slot, size, R, R_PAD)
        scores = tl.where((slot < size)[None, :], scores, float("-inf"))
        if heads_ptr is not None:
            reads = (readers[None, :] >> tl.arange(0, R_PAD)[:, None]) & 1
            scores = tl.where(reads != 0, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        peak = higher
        weight = weight * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision="ieee")
    return sums, peak, weight


@triton.jit
def _attend_fp8_tiles(
    first_query,
    second_query,
    pages_ptr,
    list_ptr,
    exponent_ptr,
    factor,
    logit_ptr,
    logit_slots,
    begin,
    end,
    size,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """`_attend_tiles` over FP8 pages, read as pairs of neighbouring channels.

    Products of pairs are split into those of first and of second channels, because bytes
    cannot be transposed on their way to tensor cores and 16-bit words can. A stored value is
    `value * 2**-e`: with scores raised by e the weights multiply what is stored and stay below 1,
    and the sum of weights takes e back.
    """
    inner = tl.arange(0, TILE)
    pair = tl.arange(0, D_PAD // 2)[None, :]
    first_sums = tl.zeros([R_PAD, D_PAD // 2], tl.float32)
    second_sums = tl.zeros([R_PAD, D_PAD // 2], tl.float32)
    peak = tl.full([R_PAD], _LOWEST, tl.float32)
    weight = tl.zeros([R_PAD], tl.float32)
    slot = begin * TILE + inner
    page = tl.load(list_ptr + slot // PAGE, mask=slot < size, other=0)
    exponents = tl.load(exponent_ptr + slot // PAGE, mask=slot < size, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        slot = tile * TILE + inner
        inside = (slot < size)[:, None]
        if D < D_PAD:
            inside = inside & (pair < D // 2)
        key_ptr = pages_ptr + (page.to(tl.int64) * (PAGE * D) + (slot % PAGE) * (D // 2))[:, None]
        shift = exponents.to(tl.int32)
        place, more = (slot + TILE) // PAGE, slot + TILE < size
        page = tl.load(list_ptr + place, mask=more, other=0)
        exponents = tl.load(exponent_ptr + place, mask=more, other=0)
        key = tl.load(key_ptr + pair, mask=inside, other=0)
        value = tl.load(key_ptr + PAGE * D // 2 + pair, mask=inside, other=0)
        scores = tl.dot(first_query, tl.trans(_first_of(key, ASM)))
        scores = tl.dot(second_query, tl.trans(_second_of(key, ASM)), scores)
        key_e, value_e = (shift << 24) >> 24, shift >> 8
        scores = scores * factor[:, None] * _power(key_e)[None, :]
        if logit_ptr is not None:
            _store_logits(logit_ptr, logit_slots, scores, slot, size, R, R_PAD)
        scores += value_e.to(tl.float32)[None, :]
        scores = tl.where((slot < size)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        peak = higher
        weight = weight * fade + tl.sum(weights * _power(-value_e)[None, :], 1)
        weights = weights.to(tl.float16)
        first_sums = tl.dot(weights, _first_of(value, ASM), first_sums * fade[:, None])
        second_sums = tl.dot(weights, _second_of(value, ASM), second_sums * fade[:, None])
    return tl.reshape(tl.join(first_sums, second_sums), [R_PAD, D_PAD]), peak, weight


@triton.jit
def _halved_query(query_at, real, R_PAD: tl.constexpr, D_PAD: tl.constexpr):
    """First and second channels of a query's pairs in float16, and the power taken out of it.

    bf16 fits float16 once it is brought below 1; its smallest channels may lose digits.
    """
    query = tl.load(query_at, mask=real, other=0.0).to(tl.float32)
    power = (tl.max(tl.abs(query), 1).to(tl.int32, bitcast=True) >> 23) - 126
    power = tl.maximum(power, -100)
    query = (query * _power(-power)[:, None]).to(tl.float16)
    first, second = tl.split(tl.reshape(query, [R_PAD, D_PAD // 2, 2]))
    return first, second, _power(power)


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
    at, end, kv_list, first, total, busy = _share(
        rows_ptr, length_ptr, kv_lists, heads, TILE, KV_LISTS, WIDE, OVERLAP
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
            first_query, second_query, power = _halved_query(query_at, real, R_PAD, D_PAD)
            sums, peak, weight = _attend_fp8_tiles(
                first_query, second_query, pages_ptr, list_ptr, exponent_ptr + list_index * places,
                scale * power, logit_at, logit_slots, at - first, stop - first, size,
                R, R_PAD, D, D_PAD, PAGE, TILE, STAGES, ASM,
            )  # fmt: skip
        else:
            query = tl.load(query_at, mask=real, other=0.0)
            factor = tl.full([R_PAD], scale, tl.float32)
            sums, peak, weight = _attend_tiles(
                query, pages_ptr, list_ptr, factor, logit_at, logit_slots, heads_at, at - first,
                stop - first, size, R, R_PAD, D, D_PAD, PAGE, TILE, STAGES,
            )  # fmt: skip
        out_at = out_ptr + kv_list * (R * D)
        within = member * D + channel
        if (at == first) & (stop == last):
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
    memory: Workspace,
    output: Tensor | None = None,
    logits: SlotLogits | None = None,
    readers: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the live slots, float32 inside.

    The host does not wait; safe inside a CUDA graph.

    Args:
        query: [b, h * g, d] with RoPE, contiguous.
        cache: What is attended; pages in the query's dtype or FP8.
        rows: Integers [b]; -1 for none, whose output is 0.
        scale: Factor on the scores.
        memory: Made for such queries.
        output: Where the result goes; None makes a tensor.
        logits: Where scores go; None for nowhere. Those behind a KV list stay as they are.
        readers: int32 [r, h, p], query heads that read a page of the table, as bits; None for all
            of them. Not with FP8.

    Returns:
        [b, h * g, d].
    """
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
        scale * _LOG2E,
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
        # parts combined at a time: many, as a pass waits for the memory, but held in registers
        CHUNK=max(1, min(triton.next_power_of_2(d) // 4, 2**12 * tuning.warps // flat)),
        WIDE=memory.programs * tiles >= 2**31,
        QUANTISED=quantised,
        ASM=query.device.type == "cuda",
        OVERLAP=overlaps(query.device),
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        launch_pdl=overlaps(query.device),
    )
    return output
