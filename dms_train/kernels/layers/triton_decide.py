"""From the eviction channel to log(1 - alpha) by key and eviction statistics, one kernel each way.

The kernels compute the same as the plain operations of `mcore`: logits, counter-based noise,
relaxation, alignment to keys, and the slots taken by hard decisions. Noise has the same bits
everywhere.

Shape letters: s positions, b samples, g KV heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dms_train.method.base import MethodOptions
from dms_train.method.documents import PackedDocuments
from dms_train.method.noise import UNIFORM_BITS, LayerNoise
from dms_train.method.splitmix import GOLDEN, MIX_1, MIX_2

_POSITIONS = 1024
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(x % 2**64) for x in (GOLDEN, MIX_1, MIX_2))
_DROPPED, _STEP = tl.constexpr(64 - UNIFORM_BITS), tl.constexpr(2.0**-UNIFORM_BITS)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _logistic(key, layer, head, position):
    """Return the variable of `method.noise.logistic_noise` for uint64 counters."""
    stream = _mix(key + layer * _GOLDEN)
    stream = _mix(stream + (head + 1) * _GOLDEN)
    bits = _mix(stream + (position + 1) * _GOLDEN) >> _DROPPED
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * _STEP
    return tl.log(uniform) - tl.log(1.0 - uniform)


@triton.jit(do_not_specialize=["layer", "first_head"])
def decide_eviction(
    channel_ptr, key_ptr, z_ptr, alpha_ptr, keep_ptr, part_ptr, layer, first_head,
    first_ptr, end_ptr, tokens_ptr, s, batch, scale, offset, tau,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, HARD: tl.constexpr, NOISY: tl.constexpr,
    MERGES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide one block of positions of one (sample, KV head)."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, blocks = tl.num_programs(1), tl.num_programs(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < s
    first, end, counts = 0, s, inside
    if PACKED:  # end of the document, and whether the token is real
        first = tl.load(first_ptr + b * s + i, mask=inside, other=0).to(tl.int32)
        end = tl.load(end_ptr + b * s + i, mask=inside, other=0).to(tl.int32)
        counts = i < tl.load(tokens_ptr + b)
    eviction_channel = tl.load(
        channel_ptr + (i.to(tl.int64) * batch + b) * groups + g, mask=inside, other=0.0
    )
    x = scale * eviction_channel - offset
    z = x
    if NOISY:
        key = tl.load(key_ptr + b).to(tl.uint64, bitcast=True)
        head = (first_head + g).to(tl.uint64)
        z = x + _logistic(key, layer.to(tl.uint64), head, i.to(tl.uint64))
    z = z / tau
    alpha = tl.sigmoid(z)
    keep = tl.minimum(-z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))
    base = (b * groups + g).to(tl.int64) * s
    tl.store(z_ptr + base + i, z, mask=inside)
    # the last SHIFT keys of a document have no decision yet; they are kept
    governs = inside & (i >= first + SHIFT)
    tl.store(keep_ptr + base + i - SHIFT, keep, mask=governs)
    tl.store(keep_ptr + base + i, tl.zeros_like(keep), mask=inside & (i >= end - SHIFT))
    counted = tl.where(z > 0, 1.0, 0.0) if HARD else alpha
    if MERGES:  # a token without a predecessor is not merged
        tl.store(alpha_ptr + base + i, tl.where(governs, alpha, 0.0), mask=inside)
        counted = tl.where(governs, counted, 0.0)
    # number of later queries for which the governed key is evicted
    without = end - WINDOW - 1 - (i - SHIFT)
    evicts = governs & counts & (x > 0) & (without > 0)
    gone = tl.where(evicts, 1, 0)
    unread = tl.where(evicts, without, 0).to(tl.float32)
    seen = tl.where(counts, i - first + 1, 0).to(tl.float32)
    out = part_ptr + ((b * groups + g) * blocks + block) * 3
    tl.store(out, tl.sum(tl.where(counts, counted, 0.0)))
    tl.store(out + 1, (tl.sum(counts.to(tl.int32)) - tl.sum(gone)).to(tl.float32))
    tl.store(out + 2, tl.sum(seen - unread) / s)


@triton.jit
def decide_eviction_backward(
    z_ptr, d_alpha_ptr, d_keep_ptr, d_stats_ptr, d_channel_ptr, first_ptr, tokens_ptr,
    s, batch, stats_stride, factor,
    SHIFT: tl.constexpr, MERGES: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_KEEP: tl.constexpr,
    HAS_STATS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of decisions."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < s
    first, counts = 0, inside
    if PACKED:
        first = tl.load(first_ptr + b * s + i, mask=inside, other=0).to(tl.int32)
        counts = i < tl.load(tokens_ptr + b)
    base = (b * groups + g).to(tl.int64) * s
    alpha = tl.sigmoid(tl.load(z_ptr + base + i, mask=inside, other=0.0))
    governs = inside & (i >= first + SHIFT)
    d_z = tl.zeros_like(alpha)
    if HAS_KEEP:
        d_z -= alpha * tl.load(d_keep_ptr + base + i - SHIFT, mask=governs, other=0.0)
    if HAS_ALPHA:
        d_alpha = tl.load(d_alpha_ptr + base + i, mask=governs, other=0.0)
        d_z += d_alpha * alpha * (1.0 - alpha)
    if HAS_STATS:
        d_alpha = tl.load(d_stats_ptr + b * stats_stride)
        if MERGES:
            d_alpha = tl.where(governs, d_alpha, 0.0)
        if PACKED:
            d_alpha = tl.where(counts, d_alpha, 0.0)
        d_z += d_alpha * alpha * (1.0 - alpha)
    at = (i.to(tl.int64) * batch + b) * groups + g
    tl.store(d_channel_ptr + at, d_z * factor, mask=inside)


class _Decide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eviction_channel: Tensor,
        options: MethodOptions,
        noise: LayerNoise | None,
        documents: PackedDocuments | None,
        merges: bool,
    ) -> Any:
        s, b, g = eviction_channel.shape
        blocks = triton.cdiv(s, _POSITIONS)
        z, keep = (eviction_channel.new_empty(b, g, s) for _ in range(2))
        alpha = torch.empty_like(z) if merges else None
        block_sums = eviction_channel.new_empty(b, g * blocks, 3)
        keys, layer, first_head = (None, 0, 0) if noise is None else noise
        first, end, tokens = _bounds(documents)
        decide_eviction[(blocks, g, b)](
            eviction_channel.contiguous(), keys, z, alpha, keep, block_sums, layer, first_head,
            first, end, tokens, s, b, options.alpha_scale, options.alpha_offset, options.tau,
            WINDOW=min(options.window, s), SHIFT=min(options.governing_shift, s),
            HARD=options.alpha_in_loss == "hard_st", NOISY=noise is not None, MERGES=merges,
            PACKED=documents is not None, BLOCK=_POSITIONS,
        )  # fmt: skip
        ctx.save_for_backward(z)
        ctx.options, ctx.documents, ctx.merges = options, documents, merges
        ctx.set_materialize_grads(False)
        return alpha, keep, block_sums.sum(1)

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(
        ctx: Any, d_alpha: Tensor | None, d_keep: Tensor | None, d_stats: Tensor | None
    ) -> Any:
        (z,) = ctx.saved_tensors
        b, g, s = z.shape
        options, d_channel = ctx.options, z.new_empty(s, b, g)
        first, _, tokens = _bounds(ctx.documents)
        decide_eviction_backward[(triton.cdiv(s, _POSITIONS), g, b)](
            z, *(None if d is None else d.contiguous() for d in (d_alpha, d_keep)), d_stats,
            d_channel, first, tokens, s, b,
            0 if d_stats is None else d_stats.stride(0), options.alpha_scale / options.tau,
            SHIFT=min(options.governing_shift, s), MERGES=ctx.merges, HAS_ALPHA=d_alpha is not None,
            HAS_KEEP=d_keep is not None, HAS_STATS=d_stats is not None,
            PACKED=first is not None, BLOCK=_POSITIONS,
        )  # fmt: skip
        return d_channel, None, None, None, None


def _bounds(
    documents: PackedDocuments | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return first position and end of every position's document, and tokens of every sample."""
    if documents is None:
        return None, None, None
    return documents.first, documents.end, documents.tokens


def decide(
    eviction_channel: Tensor,
    options: MethodOptions,
    noise: LayerNoise | None,
    documents: PackedDocuments | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the relaxed decisions of one layer.

    Args:
        eviction_channel: Activations of the eviction channel, float32 [s, b, g].
        options: Constants of the method and its training.
        noise: Seeds of the relaxation's noise; None for no noise.
        documents: Documents packed into the samples; None is one document for each sample.

    Returns:
        log(1 - alpha) by key, float32 [b, g, s], and per sample three sums over heads, float32 [b,
        3]. They are alpha (with the gradient of the soft alpha), live slots at the last token of
        each document, and reads over length. The latter two follow the inference rule and have no
        gradient.
    """
    _, keep, stats = _Decide.apply(eviction_channel, options, noise, documents, False)
    return keep, stats


def decide_merges(
    activation: Tensor,
    options: MethodOptions,
    noise: LayerNoise | None,
    documents: PackedDocuments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the relaxed decisions whether tokens continue the slot of their predecessor.

    Args:
        activation: As for `decide`.
        options: As for `decide`.
        noise: As for `decide`.
        documents: As for `decide`.

    Returns:
        alpha, float32 [s, b, g], and the results of `decide`. alpha is 0 at the first token of a
        document, which decides nothing.
    """
    alpha, keep, stats = _Decide.apply(activation, options, noise, documents, True)
    return alpha.permute(2, 0, 1), keep, stats
