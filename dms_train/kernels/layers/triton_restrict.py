"""Find the lowest-ranked token that top-k and top-p keep, ranking tokens by logit.

The rank of a token is an integer. Its high bits order tokens by logit. Its low bits hold the number
of the token, so that of equal logits the first one ranks highest. Top-k keeps all tokens from some
rank upwards; top-p keeps the tokens among them from another rank upwards. Each kernel of the search
tries 16 ranks: for each, it adds up the tokens, or their weights, from this rank upwards. The next
kernel searches between two of these ranks. The first kernel tries ranks near the best logit, so
that the others can skip most blocks of tokens. Weights are integers, so that their sums do not
depend on the division of the work.

Shape letters: b sequences, p parts of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.launch import can_overlap
from dms_train.kernels.layers.types import WEIGHT_BITS, RestrictWorkspace, SamplingLimits

_ONE = tl.constexpr(float(2**WEIGHT_BITS))
_BITS = 4  # found by one kernel
_STEPS = tl.constexpr(2**_BITS)
BLOCK = 1024  # tokens
_PARTS = 128  # most programs of a sequence
_PROGRAMS = 2048  # approximate number in total, if sequences have several programs
_ZERO_BITS = {torch.float16: 13, torch.bfloat16: 16}  # trailing zeros of a logit as float32


class Order(NamedTuple):
    """Composition of ranks.

    Attributes:
        zero_bits: Trailing zero bits of every logit as float32.
        token_bits: Bits of the number of a token.
        first: Lowest rank, a negative number.
    """

    zero_bits: int
    token_bits: int
    first: int

    @classmethod
    def of(cls, logits: Tensor) -> Order:
        """Return the composition for logits [b, vocab]."""
        zero_bits, token_bits = _ZERO_BITS.get(logits.dtype, 0), (logits.shape[1] - 1).bit_length()
        return cls(zero_bits, token_bits, -(1 << (31 - zero_bits + token_bits)))

    @property
    def shifts(self) -> range:
        """Shift of the bits found by each kernel after the first one."""
        bits = 32 - self.zero_bits + self.token_bits
        return range((bits - 1) // _BITS * _BITS, -1, -_BITS)


@triton.jit
def rank_of(logits, token, ZERO_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr):
    """Return the ranks of tokens with these logits, float32; int64."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # 0 has one sign
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> ZERO_BITS
    return (bits.to(tl.int64) << TOKEN_BITS) | ((1 << TOKEN_BITS) - 1 - token)


@triton.jit
def best_of(best_ptr, batch, PARTS: tl.constexpr):
    """Return the largest logit of a sequence."""
    return tl.max(tl.load(best_ptr + batch * PARTS + tl.arange(0, PARTS)), 0)


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
        token = (part * blocks + number) * BLOCK + tl.arange(0, BLOCK)
        at = logits_ptr + batch.to(tl.int64) * vocab + token
        logits = tl.load(at, mask=token < vocab, other=float("-inf"))
        best = tl.maximum(best, logits.to(tl.float32))
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
    rows_ptr,
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
    limit, temperature = tl.load(limit_ptr + batch), tl.load(temperature_ptr + batch)
    if WEIGHED:
        lowest, limited = tl.load(before_ptr + batch), limit < 1
    else:
        lowest, limited = tl.full([], FIRST, tl.int64), limit > 0
    if (tl.load(rows_ptr + batch) < 0) | (temperature <= 0) | (limited == 0):
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
        token = (part * blocks + number) * BLOCK + tl.arange(0, BLOCK)
        at = logits_ptr + batch.to(tl.int64) * vocab + token
        logits = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
        rank = rank_of(logits, token, ZERO_BITS, TOKEN_BITS)
        taken = (token < vocab) & (rank >= lowest)
        if tl.max(taken.to(tl.int32), 0) > 0:
            if WEIGHED:
                score = logits.to(tl.float64) / temperature - best / temperature
                score = tl.where(logits == top, 0.0, score)  # infinite logits too
                amount = (tl.exp(score) * _ONE + 0.5).to(tl.int64)
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


def parts_of(vocab: int) -> int:
    """Return the most programs of a sequence."""
    return min(_PARTS, triton.next_power_of_2(triton.cdiv(vocab, BLOCK)))


def restrict_workspace(sequences: int, device: torch.device) -> RestrictWorkspace:
    """Allocate scratch memory for this many sequences."""
    lowest = torch.zeros(2, sequences, dtype=torch.int64, device=device)
    return RestrictWorkspace(
        best=torch.empty(sequences, _PARTS, device=device),
        lowest=lowest,
        least=torch.zeros_like(lowest[0]),
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
    constants = {"BLOCK": BLOCK, "PARTS": num_parts, "OVERLAP": overlap, "launch_pdl": overlap}
    _best_kernel[(b, num_parts)](logits, memory.best, vocab, **constants)
    programs = max(1, min(num_parts, _PROGRAMS // b))
    for weighed, limit in enumerate((limits.top_k, limits.top_p)):
        for shift in (-1, *order.shifts):
            _narrow_kernel[(b, programs)](
                logits,
                temperature,
                rows,
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
                ZERO_BITS=order.zero_bits,
                TOKEN_BITS=order.token_bits,
                FIRST=order.first,
                **constants,
            )
