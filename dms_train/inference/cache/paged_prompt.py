"""Converts between the ring of a paged cache and the state of `kernels.prefill`.

The ring says by token number in which slots the last tokens lie and which of them are marked for
eviction; `kernels.prefill` takes them in the order of their positions.

Shape letters: b sequences, h KV heads, n tokens of a chunk, w window, k recent tokens that a chunk
includes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.decode.paged import ALWAYS, NEVER, Decisions
from dms_train.kernels.prefill.lists import PrefillChunk
from dms_train.kernels.prefill.sparse import PrefillState, last_slots, recent_tokens


def state_before(lengths: Tensor, ring: Tensor, seen: Tensor, source: int) -> PrefillState:
    """State of the KV lists of some rows before a chunk.

    Args:
        lengths: int32 [b, h].
        ring: int32 [b, h, w + 1], as in `kernels.decode.paged`.
        seen: int32 [b], tokens before the chunk.
        source: Where decisions come from.
    """
    size = ring.shape[-1]
    k = recent_tokens(size - 1)
    back = torch.arange(k, 0, -1, dtype=torch.int32, device=ring.device)
    token = seen[:, None] - back
    held = ((token >= 0) & (back <= size))[:, None]
    if source == NEVER:  # there is no ring; nothing ever moves
        return PrefillState(lengths, seen, torch.zeros_like(held).expand(*lengths.shape, k))
    entry = ring.gather(2, (token % size).long()[:, None].expand(*lengths.shape, k))
    slots = torch.where(held, entry // 2, -1)
    return PrefillState(lengths, seen, held & (entry % 2 > 0), slots)


def evictions(before: PrefillState, signal: Tensor | None, real: Tensor, rule: Decisions) -> Tensor:
    """Which recent and arriving tokens are evicted, as far as decided: [b, h, k + n].

    Args:
        before: State before the chunk.
        signal: bool [b, h, n] by deciding token; None if the policy does not use it.
        real: int32 [b, n], 1 for a token that exists.
        rule: How decisions are made.
    """
    n, k = real.shape[1], before.evicted.shape[-1]
    whole = F.pad(before.evicted, (0, n))
    if rule.source == NEVER:
        return whole
    if rule.source == ALWAYS:
        return torch.ones_like(whole)
    assert signal is not None
    if k == 0:  # the first chunk
        decided = signal & (real[:, None] > 0)
        return F.pad(decided[..., rule.shift :], (0, min(n, rule.shift)))
    governed = whole[..., k - rule.shift : k - rule.shift + n]
    decided = torch.where(real[:, None] > 0, signal, governed)
    return torch.cat([whole[..., : k - rule.shift], decided, whole[..., k - rule.shift + n :]], 2)


def changed_pages(before: PrefillState, window: int, places: int, page_slots: int) -> Tensor:
    """Pages that a chunk writes to: of the last tokens, and behind the older ones.

    Args:
        before: State before the chunk.
        window: Of the policy.
        places: Pages of the longest list.
        page_slots: Slots of a page.

    Returns:
        bool [b, h, places].
    """
    slots = before.slots
    if slots is None:
        slots = last_slots(before.lengths, before.seen, window)
    older = before.lengths - (slots >= 0).sum(-1)
    place = torch.arange(places, device=slots.device)
    recent = torch.where(slots >= 0, slots // page_slots, places).long()  # the rest: one more place
    found = torch.zeros(*slots.shape[:2], places + 1, dtype=torch.bool, device=slots.device)
    found = found.scatter(2, recent, torch.ones_like(recent, dtype=torch.bool))[..., :-1]
    return found | (place >= (older // page_slots)[..., None])


def ring_after(after: PrefillState, size: int) -> Tensor:
    """The ring after a chunk, int32 [b, h, size]; lists end with the last tokens."""
    k = after.evicted.shape[-1]
    newest = (after.seen - 1)[:, None]
    index = torch.arange(size, dtype=torch.int32, device=newest.device)
    back = ((newest - index) % size + 1)[:, None]  # 1 for the newest token
    marks = after.evicted.gather(2, (k - back).long().expand(*after.lengths.shape, size))
    entry = 2 * (after.lengths[..., None] - back) + marks
    return torch.where(back <= after.seen[:, None, None], entry, 0).int()


def reads(chunk: PrefillChunk, before: PrefillState, window: int) -> Tensor:
    """Slots that the queries of a chunk attend, summed over them: int64 [b, h]."""
    k = before.evicted.shape[-1]
    token = torch.arange(chunk.evicted.shape[-1], device=chunk.edges.device)
    stop = chunk.stop[:, None]
    first = token.clamp(min=k)  # of the queries that may read a token
    last = stop.expand(-1, len(token))[:, None]
    reach = torch.where(chunk.evicted, torch.minimum(last, token + window + 1), last)
    there = (token >= chunk.start[:, None]) & (token < stop)
    near = ((reach - first).clamp(min=0) * there[:, None]).sum(-1)
    if k == 0:
        return near
    older = before.lengths - before.seen.clamp(max=window + 1)[:, None]
    return near + older * (stop - k)
