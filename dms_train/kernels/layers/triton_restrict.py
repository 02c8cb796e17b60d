"""Find the lowest-ranked token that top-k and top-p keep, ranking tokens by logit.

Top-k keeps all tokens from some rank upwards; top-p keeps the tokens among them from another rank
upwards. `triton_listed` finds these ranks for most sequences. The kernels of this module search the
whole vocabulary for the others. Each of them tries 16 ranks: for each, it adds up the tokens, or
their weights, from this rank upwards. The next kernel searches between two of these ranks. The
first kernel tries ranks near the best logit, so that the others can skip most blocks of tokens.

Shape letters: b sequences, p parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.launch import can_overlap
from dms_train.kernels.layers.triton_listed import LISTED, search_listed
from dms_train.kernels.layers.triton_rank import (
    BLOCK,
    PARTS,
    Order,
    best_of,
    block_of,
    parts_of,
    rank_of,
    weight_of,
)
from dms_train.kernels.layers.types import RestrictWorkspace, SamplingLimits

_BITS = 4  # found by one kernel
_STEPS = tl.constexpr(2**_BITS)
_PROGRAMS = 2048  # approximate number in total, if sequences have several programs


@triton.jit
def _best_kernel(
    logits_ptr, best_ptr, vocab, BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(vocab, BLOCK * PARTS)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for number in range(blocks):
        _, logits = block_of(logits_ptr, batch, part * blocks + number, vocab, BLOCK)
        best = tl.maximum(best, logits)
    tl.store(best_ptr + batch * PARTS + part, tl.max(best, 0))


@triton.jit
def _tried_ranks(
    best, temperature, lowest, shift, ZERO_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr
):
    """Return the ranks that a kernel tries, int64 [16], ascending from `lowest`."""
    step = tl.arange(0, _STEPS)
    if shift < 0:
        near = (best - (_STEPS - step) * temperature).to(tl.float32)
        rank = rank_of(near, (1 << TOKEN_BITS) - 1, ZERO_BITS, TOKEN_BITS)
        tried = tl.where(step > 0, tl.maximum(rank, lowest), lowest)
    else:
        tried = lowest + (step.to(tl.int64) << shift)
    return tried


@triton.jit(do_not_specialize=["shift"])
def _narrow_kernel(
    logits_ptr,
    temperature_ptr,
    open_ptr,
    limit_ptr,
    best_ptr,
    before_ptr,
    lowest_ptr,
    least_ptr,
    sums_ptr,
    arrived_ptr,
    vocab,
    shift,
    WEIGHED: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tl.load(open_ptr + batch) == 0:
        return
    limit, temperature = tl.load(limit_ptr + batch), tl.load(temperature_ptr + batch)
    if WEIGHED:
        lowest, limited = tl.load(before_ptr + batch), limit < 1
    else:
        lowest, limited = tl.full([], FIRST, tl.int64), limit > 0
    if limited == 0:
        tl.store(lowest_ptr + batch, lowest)
        return
    if shift >= 0:
        lowest = tl.load(lowest_ptr + batch)
    top = best_of(best_ptr, batch, PARTS)
    best = top.to(tl.float64)
    tried = _tried_ranks(best, temperature, lowest, shift, ZERO_BITS, TOKEN_BITS)
    blocks = tl.cdiv(vocab, BLOCK * parts)
    sums = tl.zeros([_STEPS], tl.int64)
    for number in range(blocks):
        token, logits = block_of(logits_ptr, batch, part * blocks + number, vocab, BLOCK)
        rank = rank_of(logits, token, ZERO_BITS, TOKEN_BITS)
        taken = (token < vocab) & (rank >= lowest)
        if tl.max(taken.to(tl.int32), 0) > 0:
            if WEIGHED:
                amount = weight_of(logits, temperature, top)
            else:
                amount = tl.full([BLOCK], 1, tl.int64)
            amount = tl.where(taken, amount, 0)
            counted = rank[None, :] >= tried[:, None]
            sums += tl.sum(tl.where(counted, amount[None, :], 0), 1)
    sums_at = sums_ptr + batch * _STEPS + tl.arange(0, _STEPS)
    tl.atomic_add(sums_at, sums, sem="relaxed")
    tl.debug_barrier()  # the part is added before it is announced
    seen = tl.atomic_add(arrived_ptr + batch, 1, sem="acq_rel", scope="gpu")
    if seen == parts - 1:
        sums = tl.load(sums_at, cache_modifier=".cg")
        least = limit
        if WEIGHED:
            least = tl.load(least_ptr + batch)
            if shift < 0:
                least = tl.ceil(tl.max(sums, 0).to(tl.float64) * limit).to(tl.int64)
        reached = tl.max(tl.where(sums >= least, tried, lowest), 0)
        tl.debug_barrier()  # the sums have been read
        tl.store(lowest_ptr + batch, reached)
        if WEIGHED:
            tl.store(least_ptr + batch, least)
        tl.store(sums_at, tl.zeros([_STEPS], tl.int64))
        tl.store(arrived_ptr + batch, 0)


def restrict_workspace(sequences: int, device: torch.device) -> RestrictWorkspace:
    """Allocate scratch memory for this many sequences."""
    lowest = torch.zeros(2, sequences, dtype=torch.int64, device=device)
    return RestrictWorkspace(
        best=torch.empty(sequences, PARTS, device=device),
        lowest=lowest,
        least=torch.zeros_like(lowest[0]),
        listed=torch.empty(sequences, LISTED, dtype=torch.int64, device=device),
        near=torch.zeros(sequences, dtype=torch.int32, device=device),
        total=torch.zeros_like(lowest[0]),
        open=torch.zeros(sequences, dtype=torch.int32, device=device),
        sums=torch.zeros(sequences, 2**_BITS, dtype=torch.int64, device=device),
        arrived=torch.zeros(sequences, dtype=torch.int32, device=device),
    )


def restrict(
    logits: Tensor,
    temperature: Tensor,
    rows: Tensor,
    limits: SamplingLimits,
    memory: RestrictWorkspace,
) -> None:
    """Find the lowest ranks that top-k and top-p keep; the host does not wait.

    Args:
        logits: [b, vocab], contiguous.
        temperature: float64 [b]; 0 is not restricted.
        rows: int64 [b], cache rows; -1 for an unused batch slot.
        limits: Limits of the sequences.
        memory: For at least as many sequences; `best` and `lowest` are written.
    """
    b, vocab = logits.shape
    overlap, order, num_parts = can_overlap(logits.device), Order.of(logits), parts_of(vocab)
    constants = {"PARTS": num_parts, "OVERLAP": overlap, "launch_pdl": overlap}
    ranks = {"ZERO_BITS": order.zero_bits, "TOKEN_BITS": order.token_bits}
    _best_kernel[(b, num_parts)](logits, memory.best, vocab, BLOCK=BLOCK, **constants)
    programs = max(1, min(num_parts, _PROGRAMS // b))
    shifts = range((order.bits - 1) // _BITS * _BITS, -1, -_BITS)
    search_listed(logits, temperature, rows, limits, memory, programs)
    for weighed, limit in enumerate((limits.top_k, limits.top_p)):
        for shift in (-1, *shifts):
            _narrow_kernel[(b, programs)](
                logits,
                temperature,
                memory.open,
                limit,
                memory.best,
                memory.lowest[0],
                memory.lowest[weighed],
                memory.least,
                memory.sums,
                memory.arrived,
                vocab,
                shift,
                WEIGHED=bool(weighed),
                FIRST=order.first,
                BLOCK=BLOCK,
                **ranks,
                **constants,
            )
