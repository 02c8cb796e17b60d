"""Attention of the query heads of a group to tiles of slots of one KV list.

The kernel of `triton_attention` calls these functions. Pages hold the query's dtype or FP8. Sums of
values are returned undivided, so that the sums of several programs can be merged.

Shape letters: R query heads per KV head, D head size, PAGE slots of a page, TILE slots that are
loaded at a time; R_PAD and D_PAD are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # below any score, and finite, so that differences are numbers


@triton.jit
def _first_of(pairs, ASM: tl.constexpr):
    """Return the first of two neighbouring e4m3 channels in an int16, as float16."""
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
    """Return the second of two neighbouring e4m3 channels in an int16, as float16."""
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
    """Return 2**exponent for int32 in -126 .. 127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_logits(logit_ptr, logit_slots, scores, slot, size, R: tl.constexpr, R_PAD: tl.constexpr):
    """Store the scores of a tile, [R_PAD, TILE], by query head and slot."""
    member = tl.arange(0, R_PAD)[:, None]
    inside = (member < R) & (slot < tl.minimum(size, logit_slots))[None, :]
    tl.store(logit_ptr + member * logit_slots + slot[None, :], scores, mask=inside)


@triton.jit
def attend_tiles(
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
    """Attend query [R_PAD, D_PAD] to tiles begin .. end - 1 of a KV list with `size` slots.

    Scores are in powers of two; `factor` [R_PAD] multiplies q k.

    Returns:
        Sum of weighted values [R_PAD, D_PAD], peak score [R_PAD], sum of weights [R_PAD].
    """
    inner = tl.arange(0, TILE)
    channel = tl.arange(0, D_PAD)[None, :]
    sums = tl.zeros([R_PAD, D_PAD], tl.float32)
    peak = tl.full([R_PAD], LOWEST, tl.float32)
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
def attend_fp8_tiles(
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
    """Attend like `attend_tiles` to FP8 pages, read as pairs of neighbouring channels.

    First and second channels of the pairs have separate products. The reason is that a load for
    tensor cores can transpose 16-bit words, but not bytes. A stored value is `value * 2**-e`. The
    weights must multiply stored values and stay below 1. Scores are therefore raised by e, and the
    sum of weights takes e back.
    """
    inner = tl.arange(0, TILE)
    pair = tl.arange(0, D_PAD // 2)[None, :]
    first_sums = tl.zeros([R_PAD, D_PAD // 2], tl.float32)
    second_sums = tl.zeros([R_PAD, D_PAD // 2], tl.float32)
    peak = tl.full([R_PAD], LOWEST, tl.float32)
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
def halved_query(query_at, real, R_PAD: tl.constexpr, D_PAD: tl.constexpr):
    """Return first and second channels of a query's pairs in float16, and the power taken out.

    A bf16 query fits float16 once it is scaled below 1; its smallest channels may lose digits.
    """
    query = tl.load(query_at, mask=real, other=0.0).to(tl.float32)
    power = (tl.max(tl.abs(query), 1).to(tl.int32, bitcast=True) >> 23) - 126
    power = tl.maximum(power, -100)
    query = (query * _power(-power)[:, None]).to(tl.float16)
    first, second = tl.split(tl.reshape(query, [R_PAD, D_PAD // 2, 2]))
    return first, second, _power(power)
