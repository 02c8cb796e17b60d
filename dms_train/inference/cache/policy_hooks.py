"""Hooks of a policy applied to the slots of a layer, for caches in torch operations.

Stored and arriving tokens become one set of slots; the hooks of `CachePolicy` are applied to them.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, q queries,
s slots, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.policies.base import (
    AttentionReceived,
    CachePolicy,
    Merge,
    NewTokens,
    Slots,
)
from dms_train.inference.policies.rotation import moved_by
from dms_train.kernels.decode.slots import SecondQuery, attend_slots

QUERIES = 512  # queries of a prompt that are scored at a time
_SCORES = 2**26  # most scores in memory at a time


def join(stored: Slots, arrival: NewTokens) -> Slots:
    """Concatenate the stored tokens and the arriving ones."""
    b, h, _, width = stored.state.shape
    n = arrival.position.shape[1]
    position = torch.cat([stored.position, arrival.position[:, None].expand(b, h, n)], 2)
    state = torch.cat([stored.state, stored.state.new_zeros(b, h, n, width)], 2)
    if stored.key is None or stored.value is None:
        return Slots(stored.layer, position, state)
    key = torch.cat([stored.key, arrival.key.to(stored.key.dtype)], 2)
    value = torch.cat([stored.value, arrival.value.to(stored.value.dtype)], 2)
    return Slots(stored.layer, position, state, key, value)


def by_group(x: Tensor, heads: int) -> Tensor:
    """Reshape [b, h * r, ...] to [b, h, r, ...] for h KV heads."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def observes(policy: CachePolicy) -> bool:
    """Return whether a policy evicts by attention received."""
    return policy.scored and type(policy).observe is not CachePolicy.observe


def balances(policy: CachePolicy) -> bool:
    """Return whether a policy decides over all layers."""
    return type(policy).balance is not CachePolicy.balance


def received(weights: Tensor, mask: Tensor) -> AttentionReceived:
    """Return the attention that the slots received in a pass.

    Args:
        weights: Attention weights, [b, h * r, n, s].
        mask: bool [b, h, n, s], False for the queries of padding.
    """
    by_head = by_group(weights, mask.shape[1]) * mask[:, :, None]
    real = mask.any(-1)[:, 0]  # a query reads itself at least
    last = real.shape[1] - 1 - real.flip(1).int().argmax(1)
    index = last[:, None, None, None, None].expand(*by_head.shape[:3], 1, by_head.shape[4])
    newest = by_head.gather(3, index)[:, :, :, 0]
    return AttentionReceived(by_head.sum(3), newest, by_head.square().sum(3))


def received_from(slots: Slots, query: Tensor, at: Tensor) -> AttentionReceived:
    """Compute the attention that slots receive from queries [b, h * r, n, d] at [b, n].

    A block of `QUERIES` queries is scored at a time, or fewer where memory is short.
    """
    assert slots.key is not None
    assert slots.value is not None
    b, heads, n, _ = query.shape
    h, s = slots.position.shape[1:]
    zero = torch.zeros(b, h, heads // h, s, device=query.device)
    attention = AttentionReceived(zero, zero, zero)
    block = max(1, min(QUERIES, _SCORES // (b * heads * s)))
    for start in range(0, n, block):
        part = slice(start, start + block)
        position = slots.position[:, :, None]
        mask = (position >= 0) & (position <= at[:, None, part, None])
        weights = attend_slots(query[:, :, part], slots.key, slots.value, mask[:, :, None])[1]
        some = received(weights, mask)
        there = (at[:, part] >= 0).any(1)[:, None, None, None]
        newest = torch.where(there, some.newest, attention.newest)
        attention = AttentionReceived(
            attention.total + some.total, newest, attention.squares + some.squares
        )
    return attention


def narrowed(policy: CachePolicy, slots: Slots, mask: Tensor, query: Tensor) -> Tensor:
    """Return the slots that each query head reads, bool [b, h, 1 or r, n, s].

    Args:
        policy: The policy; it may restrict a single query to some slots.
        slots: Slots of the layer.
        mask: bool [b, h, n, s], slots that are not evicted.
        query: [b, h, r, n, d].
    """
    chosen = policy.select(slots, query[:, :, :, 0]) if query.shape[3] == 1 else None
    return mask.unsqueeze(2) if chosen is None else mask.unsqueeze(2) & chosen[:, :, :, None]


def second_query(
    policy: CachePolicy, slots: Slots, query: Tensor, at: Tensor
) -> SecondQuery | None:
    """Return the queries for keys that the policy moves, moved in the opposite direction.

    Args:
        policy: The policy.
        slots: Slots that are read.
        query: [b, heads, q, d] with RoPE applied.
        at: int64 [b, q], their positions.
    """
    moved = policy.position_shift(slots, at)
    if moved is None:
        return None
    assert slots.sequences is not None
    assert slots.sequences.frequency is not None
    back = moved_by(query, -moved.by[:, None], slots.sequences.frequency)
    return SecondQuery(back, moved.slots)


def merged(slots: Slots, merge: Merge) -> tuple[Slots, Tensor]:
    """Add evicted tokens to kept ones, at least in float32.

    Returns the slots, and whether each of them is a target, bool [b, h, s].
    """
    assert slots.key is not None
    assert slots.value is not None
    targets = torch.zeros_like(slots.position, dtype=torch.bool)
    targets.view(-1)[merge.target] = True
    changed = []
    for content, scale, weight, other in (
        (slots.key, merge.key_scale, merge.key_weight, merge.source_key),
        (slots.value, merge.value_scale, merge.value_weight, None),
    ):
        wide = content.to(torch.promote_types(content.dtype, torch.float32))
        source = wide.flatten(0, 2)[merge.source] if other is None else other.to(wide)
        result = (wide * scale[..., None]).flatten(0, 2)
        result = result.index_add(0, merge.target, source * weight[:, None].to(wide))
        changed.append(result.view_as(wide).to(content.dtype))
    return slots._replace(key=changed[0], value=changed[1]), targets
