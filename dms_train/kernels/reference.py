"""Dense, differentiable, readable attention with a soft eviction bias: judge of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.method.visibility import outside_window


def dms_attention(
    query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None, window: int, scale: float
) -> Tensor:
    """softmax(q k^T * scale + causal + [i - j > window] log(1 - alpha_j)) v.

    Args:
        query: [b, s, hq, d].
        key: [b, s, hk, d]; hq is a multiple of hk.
        value: [b, s, hk, d].
        log_keep: log(1 - alpha) [b, hk, s] by key, at least float32; None evicts nothing.
        window: Distance up to which a key is always visible, in tokens.
        scale: Factor on the scores.

    Returns:
        [b, s, hq, d] in the dtype of `query`; scores and softmax are at least float32.
    """
    b, s, hq, d = query.shape
    hk = key.shape[2]
    q = query.view(b, s, hk, hq // hk, d)
    scores = torch.einsum("bigrd,bjgd->bgrij", q, key)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * scale
    positions = torch.arange(s, device=query.device)
    if log_keep is not None:
        late = outside_window(positions, positions, window)
        bias = log_keep[:, :, None, None, :].to(scores.dtype)
        scores = scores + torch.where(late, bias, torch.zeros_like(bias))
    future = positions[None, :] > positions[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = torch.einsum("bgrij,bjgd->bigrd", weights.to(value.dtype), value)
    return out.reshape(b, s, hq, d)
