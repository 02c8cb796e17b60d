"""Sample the next token of each sequence from its logits in one kernel.

If a sequence has top-k, top-p or min-p, the kernels of `triton_restrict` run first.

The kernel uses the Gumbel-max trick with the numbers of `method.splitmix`, in float64. Temperature
0 adds no noise and takes the most likely token. Of equal scores the first one wins.

Shape letters: b sequences, p parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.launch import can_overlap
from dms_train.kernels.layers import triton_restrict
from dms_train.kernels.layers.triton_rank import BLOCK, Order, best_of, block_of, parts_of, rank_of
from dms_train.kernels.layers.types import SampleWorkspace, SamplingLimits
from dms_train.method.splitmix import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    """Shift int64 to the right, filling with zeros."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _gumbel(key, index):
    """Return standard Gumbel noise, float64, of the stream `key` at an index from 0."""
    x = key + (index.to(tl.int64) + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best(scores, tokens):
    """Return the highest score and the first token that has it."""
    best = tl.max(scores, 0)
    first = tl.min(tl.where(scores == best, tokens, 2147483647), 0)
    return best, first


@triton.jit
def _drawn(scores, key, token, left):
    """Return the highest score with noise among the kept tokens, and its token."""
    return _best(tl.where(left, scores + _gumbel(key, token), float("-inf")), token)


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    key_ptr,
    rows_ptr,
    tokens_ptr,
    last_ptr,
    score_ptr,
    token_ptr,
    arrived_ptr,
    top_ptr,
    lowest_ptr,
    log_min_p_ptr,
    vocab,
    ZERO_BITS: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + batch)
    key = tl.load(key_ptr + batch)
    if lowest_ptr is not None:
        lowest = tl.load(lowest_ptr + batch)
        top = best_of(top_ptr, batch, PARTS)
        best_scaled = top.to(tl.float64) / temperature
        floor = tl.load(log_min_p_ptr + batch)
    blocks = tl.cdiv(vocab, BLOCK * PARTS)
    best, winner = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32) + vocab
    for number in range(blocks):
        token, scores = block_of(logits_ptr, batch, part * blocks + number, vocab, BLOCK)
        if temperature > 0:
            scaled, left = scores.to(tl.float64) / temperature, token < vocab
            if lowest_ptr is not None:
                left &= rank_of(scores, token, ZERO_BITS, TOKEN_BITS) >= lowest
                left &= (scaled - best_scaled >= floor) | (scores == top)
                score, first = tl.full([], float("-inf"), tl.float64), winner
                if tl.max(left.to(tl.int32), 0) > 0:
                    score, first = _drawn(scaled, key, token, left)
            else:
                score, first = _drawn(scaled, key, token, left)
        else:
            score, first = _best(scores, token)
            score = score.to(tl.float64)
        winner = tl.where(score > best, first, winner)
        best = tl.maximum(best, score)
    tl.store(score_ptr + batch * PARTS + part, best)
    tl.store(token_ptr + batch * PARTS + part, winner)
    tl.debug_barrier()  # the part is written before it is announced
    seen = tl.atomic_add(arrived_ptr + batch, 1, sem="acq_rel", scope="gpu")
    if seen == PARTS - 1:
        at = batch * PARTS + tl.arange(0, PARTS)
        scores = tl.load(score_ptr + at, cache_modifier=".cg")
        best, winner = _best(scores, tl.load(token_ptr + at, cache_modifier=".cg"))
        winner = tl.minimum(winner, vocab - 1)  # logits are NaN
        row = tl.load(rows_ptr + batch)
        tl.store(tokens_ptr + batch, winner.to(tl.int64))
        tl.store(last_ptr + row, winner.to(tl.int64), mask=row >= 0)
        tl.store(arrived_ptr + batch, 0)


def sample_workspace(sequences: int, device: torch.device) -> SampleWorkspace:
    """Allocate scratch memory; see `LayerKernels.sample_workspace`."""
    arrived = torch.zeros(sequences, dtype=torch.int32, device=device)
    restricted = triton_restrict.restrict_workspace(sequences, device)
    scores = torch.empty_like(restricted.best, dtype=torch.float64)
    tokens = torch.empty_like(scores, dtype=torch.int32)
    return SampleWorkspace(scores, tokens, arrived, restricted)


def sample(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    rows: Tensor,
    *,
    tokens: Tensor,
    last: Tensor,
    memory: SampleWorkspace,
    limits: SamplingLimits | None = None,
) -> None:
    """Sample a token per sequence; see `LayerKernels.sample`."""
    b, vocab = logits.shape
    overlap, restricted = can_overlap(logits.device), memory.restricted
    num_parts = parts_of(vocab)
    if limits is not None:
        triton_restrict.restrict(logits, temperature, rows, limits, restricted)
    order = Order.of(logits)
    _sample_kernel[(b, num_parts)](
        logits,
        temperature,
        keys,
        rows,
        tokens,
        last,
        memory.scores,
        memory.tokens,
        memory.arrived,
        None if limits is None else restricted.best,
        None if limits is None else restricted.lowest[1],
        None if limits is None else limits.log_min_p,
        vocab,
        ZERO_BITS=order.zero_bits,
        TOKEN_BITS=order.token_bits,
        BLOCK=BLOCK,
        PARTS=num_parts,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
