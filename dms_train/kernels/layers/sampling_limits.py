"""What top-k, top-p and min-p are for the kernels and for torch operations."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Top-p adds up the weights of tokens as integers: exp(score - best score) times this power of two,
# rounded. Their sums are exact, whatever their order.
WEIGHT_BITS = 42


class Limits(NamedTuple):
    """What may be drawn, of each of b sequences.

    Attributes:
        top_k: int64 [b], most likely tokens; 0 or less for all.
        top_p: float64 [b], share of the probability of these tokens; 1 for all.
        log_min_p: float64 [b], logarithm of the least share of the best token's probability.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
