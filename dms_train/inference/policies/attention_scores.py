"""Scores from attention: the newest queries, query heads in one score, smoothing.

Shape letters: b sequences, h KV heads, r query heads per KV head, m newest queries, s slots, d head
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import Sequences, Slots

AVERAGE, MAXIMUM = "avg", "max"


def reduced(by_head: Tensor, how: str) -> Tensor:
    """Reduce [b, h, r, s] to [b, h, s] by `mean`, `max` or `sum`."""
    if how == "max":
        return by_head.amax(2)
    return by_head.mean(2) if how == "mean" else by_head.sum(2)


class WindowLogits(NamedTuple):
    """Logits of the recent queries for each slot.

    Attributes:
        logits: [b, h, r, m, s], at least float32; the lowest number where a slot is not seen.
        seen: bool [b, 1 or h, 1, m, s].
        real: bool [b, 1, 1, m, 1], False for queries before the first token.
    """

    logits: Tensor
    seen: Tensor
    real: Tensor


def window_logits(slots: Slots, sequences: Sequences) -> WindowLogits:
    """Return the scaled products of the recent queries and the keys."""
    assert slots.key is not None
    assert sequences.query is not None
    query = sequences.query.transpose(2, 3)  # [b, h, r, m, d]
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(wide) @ slots.key.to(wide).transpose(-1, -2)[:, :, None]
    logits = logits * query.shape[-1] ** -0.5
    m = query.shape[3]
    at = sequences.end[:, None] - m + torch.arange(m, device=query.device)  # [b, m]
    position = slots.position[:, :, None, None, :]
    seen = (position >= 0) & (position <= at[:, None, None, :, None])
    logits = logits.masked_fill(~seen, torch.finfo(wide).min)
    return WindowLogits(logits, seen, (at >= 0)[:, None, None, :, None])


def window_attention(slots: Slots, sequences: Sequences) -> Tensor:
    """Return the mean attention of the recent queries to each slot, [b, h, r, s].

    A query that sees none of the remaining tokens gives nothing.
    """
    logits, seen, real = window_logits(slots, sequences)
    mean: Tensor = (logits.softmax(-1) * (seen & real)).sum(3) / real.sum(3)
    return mean


def smoothed(score: Tensor, position: Tensor, kernel: int, pool: str) -> Tensor:
    """Pool scores [b, h, s] of slots over neighbouring positions, with zeros around them."""
    order = position.masked_fill(position < 0, torch.iinfo(torch.int64).max).argsort(-1)
    line = pooled(score.gather(-1, order), kernel, pool)
    return torch.empty_like(score).scatter_(-1, order, line)


def pooled(score: Tensor, kernel: int, pool: str) -> Tensor:
    """Pool scores [b, h, s] of tokens in order over their neighbours, with zeros around them."""
    pooling = F.max_pool1d if pool == MAXIMUM else F.avg_pool1d
    line: Tensor = pooling(score, kernel, stride=1, padding=kernel // 2)
    return line
