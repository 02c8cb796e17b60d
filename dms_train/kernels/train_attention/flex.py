"""Training attention with torch's FlexAttention: a compiled template around the bias, for GPUs.

Scores never reach memory. Block masks name the blocks of keys that a block of queries reads in part
or as a whole. They are built from block bounds alone, and hold (T / 128)^2 numbers instead of T^2.
torch computes the gradient of `log_keep`, because the score function reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from dms_train.kernels.errors import KernelError
from dms_train.kernels.train_attention.dense import causal_attention
from dms_train.kernels.train_attention.documents import document_of, require_one_sample

_BLOCK = 128  # positions; FlexAttention's default edge of a block

# The layers of a model share one `cu_seqlens`: its version when the mask was built, and the mask.
_document_masks: Any = WeakTensorKeyDictionary()


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

    Raises:
        KernelError: A gradient is required on a CPU; FlexAttention has none there.
    """
    require_one_sample(query, cu_seqlens)
    if log_keep is None and cu_seqlens is None and sinks is None:
        return causal_attention(query, key, value, scale)
    leaves = [x for x in (query, key, value, log_keep, sinks) if x is not None]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    if wants_gradient and query.device.type == "cpu":
        raise KernelError("FlexAttention has no backward pass on a CPU; use kernels=auto")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    wanted = None if sinks is None else AuxRequest(lse=True)
    result = _compiled()(
        q,
        k,
        v,
        score_mod=None if log_keep is None else _eviction(log_keep, window, q.shape[1]),
        block_mask=_block_mask(query.shape[1], query.device, cu_seqlens),
        scale=scale,
        enable_gqa=True,
        return_aux=wanted,
    )
    if sinks is None:
        return result.transpose(1, 2)
    out, aux = result
    share = (aux.lse - sinks[:, None]).sigmoid()  # of the denominator without the sink
    return (out * share[..., None]).to(out.dtype).transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # without fullgraph, torch would fall back to materialised scores after too many recompilations
    return torch.compile(flex_attention, fullgraph=True)


def _eviction(log_keep: Tensor, window: int | None, query_heads: int) -> Callable[..., Tensor]:
    """Return a score function that adds log_keep [b, hk, s] to keys outside the window.

    Without a window, it adds log_keep times the distance.
    """
    ratio = query_heads // log_keep.shape[1]

    def decay(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (i - j) * log_keep[b, h // ratio, j]

    if window is None:
        return decay

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j > window, score + log_keep[b, h // ratio, j], score)

    return add


def _block_mask(length: int, device: torch.device, cu_seqlens: Tensor | None) -> BlockMask:
    if cu_seqlens is None:
        return _causal_mask(length, device)
    version, mask = _document_masks.get(cu_seqlens, (None, None))
    if version != cu_seqlens._version or mask.seq_lengths != (length, length):
        mask = document_mask(document_of(cu_seqlens, length))
        _document_masks[cu_seqlens] = (cu_seqlens._version, mask)
    return mask


@functools.lru_cache(maxsize=8)
def _causal_mask(length: int, device: torch.device) -> BlockMask:
    def not_later(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    return _to_block_mask(torch.zeros(length, dtype=torch.int64, device=device), not_later)


def document_mask(documents: Tensor) -> BlockMask:
    """Return the causal block mask within documents; document numbers [s] never decrease."""

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (documents[i] == documents[j])

    return _to_block_mask(documents, same_document)


def _to_block_mask(documents: Tensor, mask: Callable[..., Tensor]) -> BlockMask:
    length = len(documents)
    starts = torch.arange(0, length, _BLOCK, device=documents.device)
    first, last = documents[starts], documents[(starts + _BLOCK - 1).clamp(max=length - 1)]
    earlier = starts < starts[:, None]  # [query blocks, key blocks]
    # two blocks share a document iff the earlier one's last is the later one's first
    seen = (starts <= starts[:, None]) & (last >= first[:, None])
    whole = earlier & (first == last[:, None]) & (starts + _BLOCK <= length)[:, None]
    partial_count, partial = _listed(seen & ~whole)
    whole_count, whole_list = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        whole_count,
        whole_list,
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(length, length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and their indices: int32 [1, 1, ...]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
