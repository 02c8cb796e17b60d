"""Attention of a few queries over gathered slots: reference for kernels that read pages in place.

Shape letters: b sequences, h KV heads, r query heads per KV head, q queries, s slots, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.kernels.sinks import softmax


class SecondQuery(NamedTuple):
    """Queries that read some of the slots instead of the main queries.

    Attributes:
        query: [b, h * r, q, d].
        slots: bool [b, h, s], the slots that they read.
    """

    query: Tensor
    slots: Tensor


def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    second: SecondQuery | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(d) + mask) v; scores and softmax are at least float32.

    Args:
        query: [b, h * r, q, d].
        key: [b, h, s, d].
        value: [b, h, s, d].
        mask: bool, [b, h, 1, q, s] or [b, h, r, q, s]; True where a query reads a slot. A query
            that reads nothing has an unspecified, finite output.
        second: Other queries for some of the slots.
        sinks: Logits [h * r] in the denominators; None for none.

    Returns:
        Output [b, h * r, q, d] in the dtype of `value`, and weights [b, h * r, q, s].
    """
    b, heads, q, d = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    transposed = key.to(wide).transpose(-1, -2).unsqueeze(2)
    scores = query.reshape(b, key.shape[1], -1, q, d).to(wide) @ transposed * d**-0.5
    if second is not None:
        other = second.query.reshape(b, key.shape[1], -1, q, d).to(wide) @ transposed * d**-0.5
        scores = torch.where(second.slots[:, :, None, None], other, scores)
    scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    weights = softmax(scores, None if sinks is None else sinks.view(key.shape[1], -1, 1))
    output = weights.to(value.dtype) @ value.unsqueeze(2)
    return output.reshape(b, heads, q, d), weights.reshape(b, heads, q, -1)
