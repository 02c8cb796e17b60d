"""Ranks and weights of tokens for top-k and top-p.

The rank of a token is an integer. Its high bits order tokens by logit. Its low bits hold the number
of the token, so that of equal logits the first one ranks highest. Weights are integers, so that
their sums do not depend on the division of the work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.layers.types import WEIGHT_BITS

_ONE = tl.constexpr(float(2**WEIGHT_BITS))
BLOCK = 1024  # tokens
PARTS = 128  # most programs of a sequence
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
    def bits(self) -> int:
        """Bits of a rank."""
        return 32 - self.zero_bits + self.token_bits


@triton.jit
def rank_of(logits, token, ZERO_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr):
    """Return the ranks of tokens with these logits, float32; int64."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # 0 has one sign
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> ZERO_BITS
    return (bits.to(tl.int64) << TOKEN_BITS) | ((1 << TOKEN_BITS) - 1 - token)


@triton.jit
def logit_of(rank, ZERO_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr):
    """Return the logits of tokens with these ranks, float32."""
    bits = (rank >> TOKEN_BITS).to(tl.int32) << ZERO_BITS
    bits = tl.where(bits < 0, (bits | ((1 << ZERO_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logits, temperature, top):
    """Return exp((logits - top) / temperature) as integers, `_ONE` for the best logit `top`."""
    score = logits.to(tl.float64) / temperature - top.to(tl.float64) / temperature
    score = tl.where(logits == top, 0.0, score)  # infinite logits too
    return (tl.exp(score) * _ONE + 0.5).to(tl.int64)


@triton.jit
def block_of(logits_ptr, batch, number, vocab, BLOCK: tl.constexpr):
    """Return the tokens of a block of the vocabulary and their logits, float32; -inf after it."""
    token = number * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + batch.to(tl.int64) * vocab + token
    return token, tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def best_of(best_ptr, batch, PARTS: tl.constexpr):
    """Return the largest logit of a sequence."""
    return tl.max(tl.load(best_ptr + batch * PARTS + tl.arange(0, PARTS)), 0)


def parts_of(vocab: int) -> int:
    """Return the most programs of a sequence."""
    return min(PARTS, triton.next_power_of_2(triton.cdiv(vocab, BLOCK)))
