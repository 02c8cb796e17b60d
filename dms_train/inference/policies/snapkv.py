"""SnapKV: prompt tokens that its last queries attend (Li et al., 2024, arXiv:2404.14469).

At the end of a prompt, the attention of the last `window` queries is averaged over them and over
the query heads of a KV head, smoothed over neighbouring positions, and the budget goes to the
highest scores and to the window itself. The paper does not fix the kind of pooling (A-SNAP1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import PolicyKind, Sequences, Slots
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.eviction import newest
from dms_train.inference.policies.scored import PromptEndPolicy, reduced
from dms_train.limits import AtLeast, Below, OneOf

AVERAGE, MAXIMUM = "avg", "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKVOptions(BudgetOptions):
    """Options of `snapkv`; the defaults are those of the Hard-KV paper.

    Attributes:
        window: Last queries that score the prompt; their tokens stay and count against the budget.
        kernel: Neighbouring positions of the smoothing, an odd number.
        pool: `avg` or `max`.
        group_reduce: How the query heads of a KV head make one score, before the smoothing.
    """

    window: Annotated[int, AtLeast(1), Below(2**16)] = 32
    kernel: Annotated[int, AtLeast(1)] = 7
    pool: Annotated[str, OneOf(AVERAGE, MAXIMUM)] = MAXIMUM
    group_reduce: Annotated[str, OneOf("mean", "max", "sum")] = "mean"

    def check(self, path: str) -> Iterator[str]:
        """One line for an even kernel, besides those of the budget."""
        yield from BudgetOptions.check(self, path)
        if self.kernel % 2 == 0:
            yield f"kernel={self.kernel}: use an odd number"


class SnapKVPolicy(PromptEndPolicy):
    """Keeps the window and the highest scores before it."""

    def __init__(self, options: SnapKVOptions) -> None:
        self._options = options
        self.recent_queries = options.window

    def scores(self, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Smoothed attention of the window, which scores infinitely."""
        budget = self.kept(slots, sequences)
        window = newest(slots.position, sequences.end, budget.clamp(max=self._options.window))
        score = reduced(window_attention(slots, sequences), self._options.group_reduce)
        inside = newest(slots.position, sequences.end, self._options.window)
        score = score.masked_fill(inside | (slots.position < 0), 0)
        score = smoothed(score, slots.position, self._options.kernel, self._options.pool)
        return score.masked_fill(window, torch.inf), budget

    def kept(self, slots: Slots, sequences: Sequences) -> Tensor:
        """How many tokens of each sequence this layer keeps, int64 [b]."""
        return self._options.tokens(sequences)


class WindowLogits(NamedTuple):
    """What the recent queries give to each slot before the softmax.

    Attributes:
        logits: [b, h, r, m, s], at least float32; the lowest number where a slot is not seen.
        seen: bool [b, 1 or h, 1, m, s].
        real: bool [b, 1, 1, m, 1], False for queries before the first token.
    """

    logits: Tensor
    seen: Tensor
    real: Tensor


def window_logits(slots: Slots, sequences: Sequences) -> WindowLogits:
    """Scaled products of the recent queries and the keys."""
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
    """Attention of the recent queries to each slot, [b, h, r, s], mean over these queries."""
    logits, _, real = window_logits(slots, sequences)
    mean: Tensor = (logits.softmax(-1) * real).sum(3) / real.sum(3)
    return mean


def smoothed(score: Tensor, position: Tensor, kernel: int, pool: str) -> Tensor:
    """Scores [b, h, s] pooled over neighbouring positions, with zeros around them."""
    order = position.masked_fill(position < 0, torch.iinfo(torch.int64).max).argsort(-1)
    line = score.gather(-1, order)
    if pool == MAXIMUM:
        line = F.max_pool1d(line, kernel, stride=1, padding=kernel // 2)
    else:
        line = F.avg_pool1d(line, kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(score).scatter_(-1, order, line)


POLICY = PolicyKind(SnapKVOptions, lambda options, spec: SnapKVPolicy(options))
