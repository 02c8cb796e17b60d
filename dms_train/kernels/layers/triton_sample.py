"""The next token of each sequence, drawn from its logits in one kernel.

The Gumbel-max trick with the numbers of `method.splitmix`, computed in float64 where a token is
drawn; no noise where the most likely token is taken. Of equal scores the first one wins.

Shape letters: b sequences, p parts of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.kernels import overlaps
from dms_train.method.splitmix import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_BLOCK = 1024
_PARTS = 128  # most programs of a sequence


class Workspace(NamedTuple):
    """Memory of one step.

    Attributes:
        scores: float64 [b, p], best of each part.
        tokens: int32 [b, p], which token that is.
        arrived: int32 [b], parts that are finished; 0 between launches.
    """

    scores: Tensor
    tokens: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, sequences: int, device: torch.device) -> Workspace:
        """For this many sequences."""
        scores = torch.empty(sequences, _PARTS, dtype=torch.float64, device=device)
        arrived = torch.zeros(sequences, dtype=torch.int32, device=device)
        return cls(scores, torch.empty_like(scores, dtype=torch.int32), arrived)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _gumbel(key, place):
    """Standard Gumbel noise, float64, of the stream `key` at a place from 0."""
    x = key + (place.to(tl.int64) + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best(scores, tokens):
    """The highest score and the first token that has it."""
    best = tl.max(scores, 0)
    first = tl.min(tl.where(scores == best, tokens, 2147483647), 0)
    return best, first


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
    vocab,
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
    blocks = tl.cdiv(vocab, BLOCK * PARTS)
    best, winner = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32) + vocab
    for number in range(blocks):
        token = (part * blocks + number) * BLOCK + tl.arange(0, BLOCK)
        at = logits_ptr + batch.to(tl.int64) * vocab + token
        scores = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            drawn = scores.to(tl.float64) / temperature + _gumbel(key, token)
            drawn = tl.where(token < vocab, drawn, float("-inf"))
            score, first = _best(drawn, token)
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
        winner = tl.minimum(winner, vocab - 1)  # logits that are not numbers
        row = tl.load(rows_ptr + batch)
        tl.store(tokens_ptr + batch, winner.to(tl.int64))
        tl.store(last_ptr + row, winner.to(tl.int64), mask=row >= 0)
        tl.store(arrived_ptr + batch, 0)


def sample(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    rows: Tensor,
    *,
    tokens: Tensor,
    last: Tensor,
    memory: Workspace,
) -> None:
    """Draw a token for each sequence; the host does not wait.

    Args:
        logits: [b, vocab], contiguous.
        temperature: float64 [b]; 0 takes the most likely token.
        keys: int64 [b], streams of random numbers.
        rows: int64 [b], cache rows; -1 for a place that is not used.
        tokens: int64 [b]; written.
        last: int64 [cache rows]; the token is written to the sequence's row.
        memory: Made for as many sequences or more.
    """
    b, vocab = logits.shape
    overlap = overlaps(logits.device)
    parts = min(_PARTS, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    _sample_kernel[(b, parts)](
        logits,
        temperature,
        keys,
        rows,
        tokens,
        last,
        memory.scores,
        memory.tokens,
        memory.arrived,
        vocab,
        BLOCK=_BLOCK,
        PARTS=parts,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
