"""Find the lowest-ranked token that top-k and top-p keep among the tokens near the best logit.

One kernel lists the tokens near the best logit, and the next one searches among them. Where too
many tokens are near, or where these are not enough for top-k or top-p, it sets `open`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.launch import can_overlap
from dms_train.kernels.layers.triton_rank import (
    BLOCK,
    Order,
    best_of,
    block_of,
    logit_of,
    parts_of,
    rank_of,
    weight_of,
)
from dms_train.kernels.layers.types import RestrictWorkspace, SamplingLimits

LISTED = 4096  # most listed tokens of a sequence, a power of two
_NEAR = tl.constexpr(12.0)  # distance from the best logit over the temperature (with top-k: of 1)


@triton.jit
def _list_kernel(
    logits_ptr,
    temperature_ptr,
    rows_ptr,
    top_k_ptr,
    best_ptr,
    listed_ptr,
    count_ptr,
    total_ptr,
    vocab,
    ZERO_BITS: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the ranks near the best logit, and add up the weights of all tokens for top-p."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, top_k = tl.load(temperature_ptr + batch), tl.load(top_k_ptr + batch)
    if (tl.load(rows_ptr + batch) < 0) | (temperature <= 0):
        return
    top = best_of(best_ptr, batch, PARTS)
    reach = tl.where(top_k > 0, tl.maximum(temperature, 1.0), temperature)
    near = (top.to(tl.float64) - _NEAR * reach).to(tl.float32)
    blocks = tl.cdiv(vocab, BLOCK * parts)
    total = tl.zeros([BLOCK], tl.int64)
    for number in range(blocks):
        token, logits = block_of(logits_ptr, batch, part * blocks + number, vocab, BLOCK)
        if top_k <= 0:
            total += tl.where(token < vocab, weight_of(logits, temperature, top), 0)
        taken = ((token < vocab) & (logits >= near)).to(tl.int32)
        each = tl.sum(taken, 0)
        if each > 0:
            first = tl.atomic_add(count_ptr + batch, each, sem="relaxed")
            place = first + tl.cumsum(taken, 0) - 1
            rank = rank_of(logits, token, ZERO_BITS, TOKEN_BITS)
            to = listed_ptr + batch.to(tl.int64) * LISTED + place
            tl.store(to, rank, mask=(taken > 0) & (place < LISTED))
    if top_k <= 0:
        tl.atomic_add(total_ptr + batch, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _highest(rank, amount, least, FIRST: tl.constexpr, RANK_BITS: tl.constexpr):
    """Return the highest rank from which on the amounts reach `least`."""
    reached = tl.full([], FIRST, tl.int64)
    for number in range(RANK_BITS):
        tried = reached + (tl.full([], 1, tl.int64) << (RANK_BITS - 1 - number))
        if tl.sum(tl.where(rank >= tried, amount, 0), 0) >= least:
            reached = tried
    return reached


@triton.jit
def _search_kernel(
    temperature_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    listed_ptr,
    count_ptr,
    total_ptr,
    lowest_ptr,
    open_ptr,
    places,
    ZERO_BITS: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    FIRST: tl.constexpr,
    RANK_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the lowest ranks of a sequence among the listed ones; set `open` where that fails."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0)
    temperature = tl.load(temperature_ptr + batch)
    top_k, top_p = tl.load(top_k_ptr + batch), tl.load(top_p_ptr + batch)
    count, total = tl.load(count_ptr + batch), tl.load(total_ptr + batch)
    lowest, both = tl.full([], FIRST, tl.int64), tl.full([], FIRST, tl.int64)
    found = tl.full([], 1, tl.int1)
    if (tl.load(rows_ptr + batch) >= 0) & (temperature > 0):
        at = tl.arange(0, LISTED)
        listed = listed_ptr + batch.to(tl.int64) * LISTED + at
        rank = tl.load(listed, mask=at < count, other=FIRST - 1)
        found = count <= LISTED
        if top_k > 0:
            found = found & (count >= top_k)
            lowest = _highest(rank, (rank >= FIRST).to(tl.int64), top_k, FIRST, RANK_BITS)
        both = lowest
        if top_p < 1:
            top = best_of(best_ptr, batch, PARTS)
            logits = logit_of(rank, ZERO_BITS, TOKEN_BITS)
            amount = tl.where(
                (at < count) & (rank >= lowest), weight_of(logits, temperature, top), 0
            )
            listed_total = tl.sum(amount, 0)
            if top_k > 0:
                total = listed_total
            least = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            found = found & (listed_total >= least)
            both = _highest(rank, amount, least, FIRST, RANK_BITS)
    tl.debug_barrier()  # the counts have been read
    tl.store(count_ptr + batch, 0)
    tl.store(total_ptr + batch, 0)
    tl.store(lowest_ptr + batch, lowest)
    tl.store(lowest_ptr + places + batch, both)
    tl.store(open_ptr + batch, (found == 0).to(tl.int32))


def search_listed(
    logits: Tensor,
    temperature: Tensor,
    rows: Tensor,
    limits: SamplingLimits,
    memory: RestrictWorkspace,
    programs: int,
) -> None:
    """Find the lowest ranks among tokens near the best logit; set `open` where that fails.

    Args:
        logits: [b, vocab], contiguous.
        temperature: float64 [b]; 0 is not restricted.
        rows: int64 [b], cache rows; -1 for an unused batch slot.
        limits: Limits of the sequences.
        memory: With `best`; `lowest` and `open` are written.
        programs: Number of programs that list the tokens of a sequence.
    """
    b, vocab = logits.shape
    overlap, order, num_parts = can_overlap(logits.device), Order.of(logits), parts_of(vocab)
    constants = {"PARTS": num_parts, "OVERLAP": overlap, "launch_pdl": overlap}
    constants |= {"ZERO_BITS": order.zero_bits, "TOKEN_BITS": order.token_bits}
    constants["LISTED"] = memory.listed.shape[1]
    _list_kernel[(b, programs)](
        logits,
        temperature,
        rows,
        limits.top_k,
        memory.best,
        memory.listed,
        memory.near,
        memory.total,
        vocab,
        BLOCK=BLOCK,
        **constants,
    )
    _search_kernel[(b,)](
        temperature,
        rows,
        limits.top_k,
        limits.top_p,
        memory.best,
        memory.listed,
        memory.near,
        memory.total,
        memory.lowest,
        memory.open,
        memory.lowest.shape[1],
        FIRST=order.first,
        RANK_BITS=order.bits,
        num_warps=8,
        **constants,
    )
