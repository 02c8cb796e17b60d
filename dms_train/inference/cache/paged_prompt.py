"""State of a paged cache before a chunk of prompts, in the form of `kernels.prefill`.

The ring of a paged cache holds, by token number, the slots of the last tokens and their eviction
marks. `kernels.prefill` takes them in the order of their positions.

Shape letters: b sequences, h KV heads, r cache rows, n tokens of a chunk, w window, k recent tokens
that a chunk includes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import NewTokens
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import ALWAYS, NEVER, Decisions
from dms_train.kernels.prefill.lists import PrefillChunk
from dms_train.kernels.prefill.sparse import PrefillState, last_slots, recent_tokens


class Chunk(NamedTuple):
    """Next tokens of some prompts, in the form that a layer receives.

    Attributes:
        rows: Cache rows, int64 [b].
        query: With RoPE, [b, query heads, n, d].
        arrival: The tokens.
        pages: Most pages that the tokens take.
        begins: Whether the cache holds nothing of these prompts.
        whole: Whether no prompt has padding.
        sinks: Logits [query heads] in the denominators; None for none.
    """

    rows: Tensor
    query: Tensor
    arrival: NewTokens
    pages: int
    begins: bool = False
    whole: bool = False
    sinks: Tensor | None = None


def state_before(
    lengths: Tensor, ring: Tensor, rows: Tensor, seen: Tensor, source: int
) -> PrefillState:
    """Return the state of the KV lists of some rows before a chunk.

    Args:
        lengths: int32 [r, h].
        ring: int32 [r, h, w + 1], as in `kernels.decode.types`.
        rows: int64 [b].
        seen: int32 [b], tokens before the chunk.
        source: Source of the decisions, as in `Decisions`.
    """
    recent = recent_tokens(ring.shape[-1] - 1)
    if source == NEVER:  # there is no ring; nothing ever moves
        held = lengths[rows]
        none = torch.zeros(*held.shape, recent, dtype=torch.bool, device=rows.device)
        return PrefillState(held, seen, none)
    kernels = dispatch.triton_kernels()
    held, evicted, slots = kernels.read_ring(lengths, ring, rows, seen, recent)
    return PrefillState(held, seen, evicted, slots)


def evictions(
    before: PrefillState, signal: Tensor | None, n: int, real: Tensor | None, rule: Decisions
) -> Tensor:
    """Return the eviction decisions known so far for recent and arriving tokens, [b, h, k + n].

    Args:
        before: State before the chunk.
        signal: bool [b, h, n] by deciding token; None if the policy does not use it.
        n: Tokens of the chunk.
        real: bool [b, n], whether a token exists; None if all do.
        rule: Rule of the decisions.
    """
    k = before.evicted.shape[-1]
    whole = F.pad(before.evicted, (0, n))
    if rule.source == NEVER:
        return whole
    if rule.source == ALWAYS:
        return torch.ones_like(whole)
    assert signal is not None
    if k == 0:  # the first chunk
        decided = signal if real is None else signal & real[:, None]
        return F.pad(decided[..., rule.shift :], (0, min(n, rule.shift)))
    governed = whole[..., k - rule.shift : k - rule.shift + n]
    decided = signal if real is None else torch.where(real[:, None], signal, governed)
    return torch.cat([whole[..., : k - rule.shift], decided, whole[..., k - rule.shift + n :]], 2)


def changed_pages(before: PrefillState, window: int, places: int, page_slots: int) -> Tensor:
    """Return the pages that a chunk writes to.

    Args:
        before: State before the chunk.
        window: Window of the policy.
        places: Pages of the longest list.
        page_slots: Slots of a page.

    Returns:
        bool [b, h, places].
    """
    slots = before.slots
    if slots is None:
        slots = last_slots(before.lengths, before.seen, window)
    kernels = dispatch.triton_kernels()
    return kernels.changed_pages(before.lengths, slots, places, page_slots)


def commit_prefill(
    chunk: PrefillChunk, before: PrefillState, ring: Tensor, rows: Tensor, source: int
) -> Tensor:
    """Write the last tokens of a chunk to the ring, and count the slots that its queries read.

    Args:
        chunk: The chunk; its tokens are already stored.
        before: State before it.
        ring: int32 [r, h, w + 1]; updated, unless there are no decisions.
        rows: int64 [b].
        source: Source of the decisions, as in `Decisions`.

    Returns:
        Slots read, summed over the queries: int64 [b, h].
    """
    return dispatch.triton_kernels().commit_prefill(
        chunk,
        before.lengths,
        before.seen,
        recent=before.evicted.shape[-1],
        ring=ring,
        rows=rows,
        evicts=source != NEVER,
    )
