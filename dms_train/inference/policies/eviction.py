"""Eviction to a budget: the highest scores stay.

Shape letters: b sequences, h KV heads, s slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def beyond_budget(score: Tensor, position: Tensor, budget: Tensor) -> Tensor:
    """Return the tokens beyond a budget, bool [b, h, s].

    The highest scores stay; of equal scores, the lower position. Empty slots are not counted.

    Args:
        score: [b, h, s]; infinite for tokens that have priority over all others.
        position: int64 [b, h, s]; -1 for an empty slot.
        budget: int64 [b], or [b, h].
    """
    held = position >= 0
    score = score.masked_fill(~held, -torch.inf)
    by_position = position.masked_fill(~held, torch.iinfo(torch.int64).max).argsort(-1)
    by_score = score.gather(-1, by_position).argsort(dim=-1, descending=True, stable=True)
    order = by_position.gather(-1, by_score)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, rank)
    limit = budget.view(*budget.shape, *[1] * (3 - budget.dim()))
    return held & (rank >= limit)


def beyond_shared_budget(score: Tensor, position: Tensor, budget: Tensor) -> Tensor:
    """Apply `beyond_budget` to KV heads of a layer that share their budgets, int64 [b].

    Of equal scores the lower position stays, and of equal positions the lower head.
    """
    h = position.shape[1]
    head = torch.arange(h, device=position.device)[:, None]
    order = torch.where(position >= 0, position * h + head, -1)
    beyond = beyond_budget(score.flatten(1)[:, None], order.flatten(1)[:, None], budget * h)
    return beyond.view_as(position)


def newest(position: Tensor, end: Tensor, count: Tensor | int) -> Tensor:
    """Return the last `count` tokens of each sequence, bool [b, h, s].

    Args:
        position: int64 [b, h, s].
        end: int64 [b], tokens so far.
        count: int64 [b], or one number for all.
    """
    return position >= (end - count)[:, None, None]
