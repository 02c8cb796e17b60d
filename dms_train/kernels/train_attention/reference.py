"""Dense, differentiable attention with a soft eviction bias: the reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.kernels.sinks import softmax
from dms_train.kernels.train_attention.documents import document_of, require_one_sample
from dms_train.method.visibility import outside_window


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
    """Compute softmax(q k^T * scale + causal + [i - j > window] log(1 - alpha_j)) v.

    Args:
        query: [b, s, hq, d].
        key: [b, s, hk, d]; hq is a multiple of hk.
        value: [b, s, hk, d].
        log_keep: log(1 - alpha) [b, hk, s] by key, at least float32; None evicts nothing.
        window: Distance up to which a key is always visible, in tokens.
        scale: Factor on the scores.
        cu_seqlens: Bounds of the documents packed into the sample (b = 1), int32
            [documents + 1], see `documents`; a query sees its own document only. None is
            one document for each sample.
        sinks: Logits [hq] in the denominators, at least float32; None for none.

    Returns:
        [b, s, hq, d] in the dtype of `query`; scores and softmax are at least float32.

    Raises:
        KernelError: Packed documents in more than one sample.
    """
    require_one_sample(query, cu_seqlens)
    b, s, hq, d = query.shape
    hk = key.shape[2]
    q = query.view(b, s, hk, hq // hk, d).permute(0, 2, 3, 1, 4)  # [b, hk, r, s, d]
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (key, value))  # [b, hk, 1, s, d]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    positions = torch.arange(s, device=query.device)
    bias = scores.new_zeros(b, hk, s, s)
    if log_keep is not None:
        by_key = log_keep[:, :, None, :].to(scores.dtype)
        if window is None:
            bias = by_key * (positions[:, None] - positions).clamp(min=0)
        else:
            bias = torch.where(outside_window(positions, positions, window), by_key, bias)
    hidden = positions[None, :] > positions[:, None]
    if cu_seqlens is not None:
        documents = document_of(cu_seqlens, s)
        hidden |= documents[None, :] != documents[:, None]
    scores = scores + bias.masked_fill(hidden, float("-inf")).unsqueeze(2)
    by_head = None if sinks is None else sinks.view(hk, -1, 1)
    out = softmax(scores, by_head).to(value.dtype) @ v
    return out.permute(0, 3, 1, 2, 4).reshape(b, s, hq, d)
