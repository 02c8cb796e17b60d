"""One query token per sequence over the live slots of a paged cache, in one kernel.

The work of all lanes is laid end to end, in tiles of slots, and cut into as many equal parts as
there are programs, so it does not matter how unequal the lanes are. Every program finds its part
from the lengths, which only the device knows. A lane that several programs share is put together
by the one that finishes last.

Shape letters: b sequences, h KV heads, g query heads per KV head, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.paged import FP8, PagedCache

_LOG2E = 1.4426950408889634
_LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite, so that differences are numbers


class Tuning(NamedTuple):
    """How the kernel is cut.

    Attributes:
        tile: Slots that are loaded at a time, a power of two.
        warps: Warps of a program.
        stages: Tiles on their way at the same time.
        per_sm: Programs of a multiprocessor.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 2


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
    """Tuning for a head size and bytes per channel of the cache: 16 KB of keys at a time."""
    return Tuning(tile=max(16, min(128, 2**14 // (triton.next_power_of_2(d) * itemsize))))


def workspace(query: Tensor, cache: PagedCache, tuning: Tuning | None = None) -> Workspace:
    """Workspace for queries like [b, h * g, d]."""
    b, all_heads, d = query.shape
    heads = cache.lengths.shape[1]
    lanes, device = b * heads, query.device
    tuning = tuning or default_tuning(d, cache.pages.dtype.itemsize)
    units = 4
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    programs = units * tuning.per_sm
    slots, group = programs + lanes, all_heads // heads
    return Workspace(
        parts=torch.empty(slots, group, d, device=device),
        weights=torch.empty(slots, 2, group, device=device),
        arrived=torch.zeros(lanes, dtype=torch.int32, device=device),
        programs=programs,
        tuning=tuning,
    )


@triton.jit
def _share(
    rows_ptr,
    length_ptr,
    lanes,
    heads,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """This program's part of all tiles.

    Returns:
        Its first tile, its end, the lane of its first tile, that lane's first tile, the number of
        tiles and the number of programs that have any.
    """
    lane = tl.arange(0, LANES)
    inside = lane < lanes
    row = tl.load(rows_ptr + lane // heads, mask=inside, other=-1)
    length = tl.load(length_ptr + row * heads + lane % heads, mask=row >= 0, other=0)
    tiles = tl.where(inside, tl.maximum(tl.cdiv(length, TILE), 1), 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0).to(tl.int64)
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
    count,
    R: tl.constexpr,
    D: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Output of a lane, [R, D], from `count` parts that follow each other."""
    flat = tl.arange(0, FLAT)[None, :]
    chunk = tl.arange(0, CHUNK)[:, None]
    member = flat // D
    peak = tl.full([FLAT], _LOWEST, tl.float32)
    for start in range(0, count, CHUNK):
        real = (start + chunk < count) & (flat < R * D)
        at = weight_ptr + (start + chunk) * 2 * R + member
        peaks = tl.load(at, mask=real, other=_LOWEST, cache_modifier=".cg")
        peak = tl.maximum(peak, tl.max(peaks, 0))
    total = tl.zeros([FLAT], tl.float32)
    weight = tl.zeros([FLAT], tl.float32)
    for start in range(0, count, CHUNK):
        real = (start + chunk < count) & (flat < R * D)
        at = weight_ptr + (start + chunk) * 2 * R + member
        peaks = tl.load(at, mask=real, other=_LOWEST, cache_modifier=".cg")
        weights = tl.load(at + R, mask=real, other=0.0, cache_modifier=".cg")
        part_at = part_ptr + (start + chunk) * R * D + flat
        parts = tl.load(part_at, mask=real, other=0.0, cache_modifier=".cg")
        factor = tl.exp2(peaks - peak[None, :])
        total += tl.sum(parts * factor, 0)
        weight += tl.sum(weights * factor, 0)
    out_at = tl.arange(0, FLAT)
    output = tl.where(weight > 0, total / weight, 0.0)
    tl.store(out_ptr + out_at, output.to(out_ptr.dtype.element_ty), mask=out_at < R * D)


@triton.jit
def _attend_tiles(
    query,
    pages_ptr,
    list_ptr,
    exponent_ptr,
    factor,
    begin,
    end,
    size,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    QUANTISED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of query [R_PAD, D_PAD] to tiles begin .. end - 1 of a lane with `size` slots.

    Scores are in powers of two; `factor` [R_PAD] multiplies q k. A stored value is
    `value * 2**-e`, so with scores raised by e the weights multiply what is stored, and the sum of
    weights takes e back.

    Returns:
        Sum of weighted values [R_PAD, D_PAD], peak score [R_PAD], sum of weights [R_PAD].
    """
    inner = tl.arange(0, TILE)
    channel = tl.arange(0, D_PAD)[None, :]
    sums = tl.zeros([R_PAD, D_PAD], tl.float32)
    peak = tl.full([R_PAD], _LOWEST, tl.float32)
    weight = tl.zeros([R_PAD], tl.float32)
    place = (begin * TILE + inner) // PAGE
    page = tl.load(list_ptr + place, mask=begin * TILE + inner < size, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        slot = tile * TILE + inner
        inside = (slot < size)[:, None]
        if D < D_PAD:
            inside = inside & (channel < D)
        key_at = page.to(tl.int64) * (2 * PAGE * D) + (slot % PAGE) * D
        key_ptr = pages_ptr + key_at[:, None] + channel
        page = tl.load(list_ptr + (slot + TILE) // PAGE, mask=slot + TILE < size, other=0)
        key = tl.load(key_ptr, mask=inside, other=0.0)
        value = tl.load(key_ptr + PAGE * D, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores = scores * factor[:, None]
        if QUANTISED:
            pair_ptr = exponent_ptr + slot // PAGE * 2
            key_e = tl.load(pair_ptr, mask=slot < size, other=0).to(tl.float32)
            value_e = tl.load(pair_ptr + 1, mask=slot < size, other=0).to(tl.float32)
            scores = scores * tl.exp2(key_e)[None, :] + value_e[None, :]
        scores = tl.where((slot < size)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        peak = new_peak
        if QUANTISED:
            weight = weight * fade + tl.sum(weights * tl.exp2(-value_e)[None, :], 1)
        else:
            weight = weight * fade + tl.sum(weights, 1)
        weights = weights.to(query.dtype)
        sums = tl.dot(weights, value.to(query.dtype), sums * fade[:, None], input_precision="ieee")
    return sums, peak, weight


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
    scale,
    lanes,
    heads,
    places,
    LANES: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANTISED: tl.constexpr,
    STAGES: tl.constexpr,
):
    at, end, lane, first, total, busy = _share(rows_ptr, length_ptr, lanes, heads, TILE, LANES)
    member, channel = tl.arange(0, R_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    real = (member < R) & (channel < D)
    while at < end:
        row = tl.load(rows_ptr + lane // heads)
        home = (row * heads + lane % heads).to(tl.int64)
        size = tl.load(length_ptr + home, mask=row >= 0, other=0)
        last = first + tl.maximum(tl.cdiv(size, TILE), 1)
        stop = tl.minimum(last, end)
        query_at = query_ptr + lane * (R * D) + member * D + channel
        query = tl.load(query_at, mask=real, other=0.0)
        factor = tl.full([R_PAD], scale, tl.float32)
        if QUANTISED:  # e4m3 fits float16 exactly, and so does bf16 brought below 1
            wide = query.to(tl.float32)
            power = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23) - 126
            power = tl.maximum(power, -100).to(tl.float32)
            query = (wide * tl.exp2(-power)[:, None]).to(tl.float16)
            factor = factor * tl.exp2(power)
        sums, peak, weight = _attend_tiles(
            query,
            pages_ptr,
            table_ptr + home * places,
            exponent_ptr + home * places * 2 if QUANTISED else exponent_ptr,
            factor,
            at - first,
            stop - first,
            size,
            R_PAD,
            D,
            D_PAD,
            PAGE,
            TILE,
            QUANTISED,
            STAGES,
        )
        out_at = out_ptr + lane * (R * D)
        within = member * D + channel
        if (at == first) & (stop == last):
            output = tl.where(weight[:, None] > 0, sums / weight[:, None], 0.0)
            tl.store(out_at + within, output.to(out_ptr.dtype.element_ty), mask=real)
        else:
            # program + lane grows by one from part to part, within a lane and across
            part = (tl.program_id(0) + lane).to(tl.int64)
            tl.store(part_ptr + part * (R * D) + within, sums, mask=real)
            weight_at = weight_ptr + part * (2 * R) + tl.arange(0, R_PAD)
            tl.store(weight_at, peak, mask=tl.arange(0, R_PAD) < R)
            tl.store(weight_at + R, weight, mask=tl.arange(0, R_PAD) < R)
            tl.debug_barrier()  # the whole part is written before it is announced
            opener = ((first + 1) * busy - 1) // total
            count = ((last * busy - 1) // total - opener + 1).to(tl.int32)
            seen = tl.atomic_add(arrived_ptr + lane, 1, sem="acq_rel", scope="gpu")
            if seen == count - 1:
                part = opener + lane
                _merge(
                    part_ptr + part * (R * D),
                    weight_ptr + part * (2 * R),
                    out_at,
                    count,
                    R,
                    D,
                    FLAT,
                    CHUNK,
                )
                tl.store(arrived_ptr + lane, 0)
        at, first, lane = stop, last, lane + 1


def attend(
    query: Tensor,
    cache: PagedCache,
    rows: Tensor,
    scale: float,
    memory: Workspace,
    output: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the live slots, float32 inside.

    Nothing waits for the device; safe inside a CUDA graph.

    Args:
        query: [b, h * g, d] with RoPE, contiguous.
        cache: What is attended; pages in the query's dtype or FP8.
        rows: Integers [b]; -1 for none, whose output is 0.
        scale: Factor on the scores.
        memory: Made for such queries.
        output: Where the result goes; None makes a tensor.

    Returns:
        [b, h * g, d].
    """
    b, all_heads, d = query.shape
    h = cache.lengths.shape[1]
    group, tuning = all_heads // h, memory.tuning
    output = torch.empty_like(query) if output is None else output
    flat = triton.next_power_of_2(group * d)
    _decode_kernel[(memory.programs,)](
        query,
        cache.pages,
        cache.table,
        cache.exponents,
        cache.lengths,
        rows,
        output,
        memory.parts,
        memory.weights,
        memory.arrived,
        scale * _LOG2E,
        b * h,
        h,
        cache.table.shape[-1],
        LANES=triton.next_power_of_2(b * h),
        R=group,
        R_PAD=max(16, triton.next_power_of_2(group)),
        D=d,
        D_PAD=max(16, triton.next_power_of_2(d)),
        PAGE=cache.page_slots,
        TILE=tuning.tile,
        FLAT=flat,
        CHUNK=max(1, 4096 // flat),
        QUANTISED=cache.pages.dtype == FP8,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return output
