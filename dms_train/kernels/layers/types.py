"""Arguments and scratch memory of the layer kernels and of the sampling kernels.

Shape letters: m tokens, k channels of a layer's input, d head size, b sequences, p parts of the
channels or of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Top-p adds up the weights of tokens as integers: exp(score - best score) times this power of two,
# rounded. Their sums are exact in any order.
WEIGHT_BITS = 42


class SamplingLimits(NamedTuple):
    """Limits of the tokens that may be sampled, for each of b sequences.

    Attributes:
        top_k: int64 [b], number of most likely tokens to keep; 0 or less keeps all.
        top_p: float64 [b], share of the probability of these tokens to keep; 1 keeps all.
        log_min_p: float64 [b], logarithm of the smallest probability to keep, relative to the best
            token's.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


class EvictionChannel(NamedTuple):
    """Scaling of the eviction channel of the first query head of each KV head.

    Attributes:
        channel: Its index, from 0.
        factor: Factor on its activation, a number or float32 [] on the device.
        clear_after_rope: Whether the factor also acts on the channel after RoPE, so that it is
            applied exactly once on every path through the eviction channel.
    """

    channel: int
    factor: float | Tensor
    clear_after_rope: bool


class NormedInput(NamedTuple):
    """Input of a matrix product before the division that completes its RMSNorm.

    Attributes:
        scaled: [m, k], the residual stream times the norm's weight.
        squares: float32 [p, m], sums of squares of the residual stream by block of channels.
        epsilon: Added to the mean of the squares.
    """

    scaled: Tensor
    squares: Tensor
    epsilon: float


class LinearWorkspace(NamedTuple):
    """Scratch memory of matrix products, shared by all products that follow each other.

    Attributes:
        parts: float32 [any], partial sums of products whose input channels are split.
        arrived: int32 [any], parts that are written; 0 between launches.
    """

    parts: Tensor
    arrived: Tensor


class EmbeddingTables(NamedTuple):
    """Tables that the first kernel of a step reads.

    Attributes:
        embedding: [vocab, k].
        cos: [positions, d].
        sin: [positions, d].
        last: int64 [rows], the newest token of every cache row.
    """

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    last: Tensor


class RestrictWorkspace(NamedTuple):
    """Scratch memory of top-k and top-p. A rank orders tokens by logit, then by token number.

    Attributes:
        best: float32 [b, p], the largest logit of each part of the vocabulary.
        lowest: int64 [2, b], the lowest rank kept by top-k, and by top-k and top-p together.
        least: int64 [b], the weight that top-p asks for.
        listed: int64 [b, l], ranks of tokens near the best logit, in any order.
        near: int32 [b], number of these tokens, which may exceed l; 0 between launches.
        total: int64 [b], weight of all tokens; 0 between launches.
        open: int32 [b], 1 where the whole vocabulary is searched.
        sums: int64 [b, 16], number or weight of the tokens from each tried rank on; 0 between
            launches.
        arrived: int32 [b], finished parts; 0 between launches.
    """

    best: Tensor
    lowest: Tensor
    least: Tensor
    listed: Tensor
    near: Tensor
    total: Tensor
    open: Tensor
    sums: Tensor
    arrived: Tensor


class SampleWorkspace(NamedTuple):
    """Scratch memory of sampling.

    Attributes:
        scores: float64 [b, p], best score of each part of the vocabulary.
        tokens: int32 [b, p], the token that has it.
        arrived: int32 [b], finished parts; 0 between launches.
        restricted: Scratch memory of top-k and top-p.
    """

    scores: Tensor
    tokens: Tensor
    arrived: Tensor
    restricted: RestrictWorkspace
