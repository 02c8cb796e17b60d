"""Attention with a soft eviction bias in blocks of queries, for devices without a fused kernel.

Only the scores of one block exist at a time, and the backward pass computes them again. Memory
therefore grows with T, not T^2, and a block stays in the processor's cache. A block reads its past
only, which halves the work. Without a bias, torch's own fused attention is called.

Shape letters: n = samples * KV heads, r query heads per KV head, s positions, d head size; row
i * r + h of a query block is query i of the group's head h.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.kernels.sinks import softmax
from dms_train.kernels.train_attention.dense import causal_attention
from dms_train.kernels.train_attention.documents import document_slices, require_one_sample

# Queries of a block: on a CPU the scores should stay in its cache, a GPU needs few launches.
_CPU_BLOCK, _GPU_BLOCK = 64, 512


def dms_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor | None,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with a soft eviction bias; see `interface.DMSAttention`.

    Packed documents are attended one after the other; their bounds are read on the host.
    """
    require_one_sample(query, cu_seqlens)
    if cu_seqlens is not None:
        outputs = [
            dms_attention(
                query[:, where],
                key[:, where],
                value[:, where],
                None if log_keep is None else log_keep[..., where],
                window,
                scale,
                sinks=sinks,
            )
            for where in document_slices(cu_seqlens, query.shape[1])
        ]
        return torch.cat(outputs, 1)
    if log_keep is None and sinks is None:
        return causal_attention(query, key, value, scale)
    if log_keep is None:
        log_keep = key.new_zeros(len(key), key.shape[2], key.shape[1], dtype=torch.float32)
    return _with_bias((query, key, value), log_keep, window, scale, sinks)


def _with_bias(
    heads: tuple[Tensor, Tensor, Tensor],
    log_keep: Tensor,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    query, key, value = heads
    b, s, hq, d = query.shape
    hk = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.view(b, s, hk, hq // hk, d).transpose(1, 2).reshape(b * hk, -1, d).to(wide)
    k, v = (x.transpose(1, 2).reshape(b * hk, s, d).to(wide) for x in (key, value))
    if sinks is not None:
        sinks = sinks.to(wide).view(1, hk, -1).expand(b, -1, -1).reshape(b * hk, -1)
    out = _Blockwise.apply(q * scale, k, v, log_keep.reshape(b * hk, s).to(wide), sinks, window)
    out = out.to(value.dtype).view(b, hk, s, hq // hk, d)
    return out.transpose(1, 2).reshape(b, s, hq, d)


class _Blockwise(torch.autograd.Function):
    """Attend q [n, s * r, d], scaled, to k and v [n, s, d]; log_keep [n, s], sinks [n, r]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, log_keep, sinks, window = inputs
        ctx.save_for_backward(q, k, v, log_keep, sinks)
        ctx.window = window
        out = torch.empty_like(q)
        for block in _blocks(q, k):
            weights = _weights(q[:, block.rows], k, log_keep, sinks, window, block)
            out[:, block.rows] = torch.bmm(weights, v[:, : block.last])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_keep, sinks = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_q = torch.empty_like(q)
        d_k, d_v, d_log_keep = (torch.zeros_like(x) for x in (k, v, log_keep))
        d_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block in _blocks(q, k):
            first, last, rows = block
            weights = _weights(q[:, rows], k, log_keep, sinks, ctx.window, block)
            d_v[:, :last] += torch.bmm(weights.transpose(1, 2), d_out[:, rows])
            d_weights = torch.bmm(d_out[:, rows], v[:, :last].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_q[:, rows] = torch.bmm(d_scores, k[:, :last])
            d_k[:, :last] += torch.bmm(d_scores.transpose(1, 2), q[:, rows])
            _add_bias_gradient(d_log_keep, d_scores, ctx.window, first, last)
            if d_sinks is not None:
                # the scores of a row and its sink shift together without effect, so that their
                # gradients add up to 0
                d_sinks -= d_scores.sum(-1).unflatten(1, (last - first, -1)).sum(1)
        return d_q, d_k, d_v, d_log_keep, d_sinks, None


class _Block(NamedTuple):
    """First query of a block, the query after its last one, and its rows."""

    first: int
    last: int
    rows: slice


def _blocks(q: Tensor, k: Tensor) -> list[_Block]:
    """Return the blocks of queries."""
    length = k.shape[1]
    size = _GPU_BLOCK if q.is_cuda else _CPU_BLOCK
    r = q.shape[1] // length
    bounds = ((i, min(i + size, length)) for i in range(0, length, size))
    return [_Block(first, last, slice(first * r, last * r)) for first, last in bounds]


def _weights(
    q: Tensor,
    k: Tensor,
    log_keep: Tensor,
    sinks: Tensor | None,
    window: int | None,
    block: _Block,
) -> Tensor:
    """Compute the attention weights of a block's queries on all keys before its end."""
    first, last, _ = block
    distance = _distance(first, last, 0, q.device)
    by_key = log_keep[:, None, :last]
    bias = by_key * distance if window is None else torch.where(distance > window, by_key, 0.0)
    bias.masked_fill_(distance < 0, float("-inf"))
    scores = torch.bmm(q, k[:, :last].transpose(1, 2))
    by_query = scores.view(len(q), last - first, -1, last)
    by_query.add_(bias[:, :, None])
    return softmax(by_query, None if sinks is None else sinks[:, None]).flatten(1, 2)


def _add_bias_gradient(
    d_log_keep: Tensor, d_scores: Tensor, window: int | None, first: int, last: int
) -> None:
    """Sum d_scores [n, rows, last] for each key over the queries whose window excludes it.

    Without a window, sum over all queries, each times its distance.
    """
    if window is None:
        by_query = d_scores.unflatten(1, (last - first, -1)).sum(2)
        d_log_keep[:, :last] += (by_query * _distance(first, last, 0, by_query.device)).sum(1)
        return
    old = max(0, first - window)  # these keys are outside the window of every query
    d_log_keep[:, :old] += d_scores[:, :, :old].sum(1)
    edge = d_scores[:, :, old:].unflatten(1, (last - first, -1)).sum(2)
    late = _distance(first, last, old, edge.device) > window
    d_log_keep[:, old:last] += (edge * late).sum(1)


def _distance(first: int, last: int, oldest: int, device: torch.device) -> Tensor:
    """Return query minus key position, [last - first, last - oldest]."""
    queries = torch.arange(first, last, device=device)
    return queries[:, None] - torch.arange(oldest, last, device=device)
