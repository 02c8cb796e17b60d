"""Compact KV cache in pages, as the decode kernels read and write it.

A KV list is one (cache row, KV head) of one layer. Its live tokens fill slots 0 .. length - 1 of
its page list without holes, in any order. All tensors are on the device.

A decode step stores one token per sequence and evicts at most one token per KV list. The new token
reuses the slot of the evicted one. Steps therefore never release pages; they only pop pages from
the free list.

KV lists may share pages. A step copies a shared page before it stores a token in it. It pops at
most one page per KV list, either for a new page or for a copy.

Shape letters: n pages of a slab, s slots of a page, d head size, r cache rows, h KV heads, p pages
of a full KV list, w window, b sequences of a step, g query heads per KV head, m tokens that a DMC
state averages besides the newest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.method.base import MethodSpec

NEVER, ALWAYS, EVICTION_CHANNEL, SIGNAL, CHOSEN = range(5)  # source of the eviction decisions
OLDEST, SUMMED, LEAST, DECAYED = range(4)  # which token of a KV list is evicted after a step
MEAN, MAXIMUM, SUM = range(3)  # how the scores of a query group are combined
OUT_OF_PAGES, LIST_FULL = 1, 2  # bits of FreePages.fault
FP8 = torch.float8_e4m3fn


class FreePages(NamedTuple):
    """Stack of free pages in device memory, shared by all layers.

    Attributes:
        numbers: int32 [capacity]; the first `left` are free.
        left: int32 [1].
        fault: int32 [1]. The bit OUT_OF_PAGES or LIST_FULL is set once a token could not be
            stored. The step that set it is invalid.
        holders: int32 [n], number of KV lists that hold a page; 1 for a free page. It is 0 if all
            holders have copied a page in the same step; the page can then be collected. None if
            pages are never shared.
    """

    numbers: Tensor
    left: Tensor
    fault: Tensor
    holders: Tensor | None = None

    @classmethod
    def all_of(cls, pages: int, device: torch.device) -> FreePages:
        """Return a stack with the pages 1 to `pages`."""
        put: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            numbers=torch.arange(pages, 0, -1, **put),
            left=torch.tensor([pages], **put),
            fault=torch.zeros(1, **put),
            holders=torch.ones(pages + 1, **put),
        )


class PagedCache(NamedTuple):
    """KV cache of one layer.

    A page holds the keys of its slots, then their values. A page number is the distance from the
    start of `pages`, in pages. If no page is shared, further slabs may lie anywhere in memory at a
    multiple of the page size, also before `pages` with negative numbers. Page 0 is never
    allocated, so that unused entries of the table can be read.

    Attributes:
        pages: [n, 2, s, d], the first slab, in bf16, fp16, fp32 or float8_e4m3fn.
        table: int32 [r, h, p], page numbers (the block table).
        lengths: int32 [r, h], live slots.
        ring: int32 [r, h, w + 1]; token t lies in slot `ring[t % (w + 1)] // 2`. An odd entry means
            that t is evicted when it leaves the window. The ring covers the last w + 1 tokens
            only. With CHOSEN, w is 0, and an odd entry is `2 * slot + 1` of the token to evict.
        exponents: int8 [r, h, p, 2] for FP8 pages, of keys and of values: stored is `key * 2**-e`.
        free: Source of new pages.
        positions: int32 [r, h, p * s], position of the token in each slot; None if not kept.
        bounds: [n, 2, d], minimum and maximum of each channel of the keys of a page, from which no
            token may be evicted; None if not kept.
    """

    pages: Tensor
    table: Tensor
    lengths: Tensor
    ring: Tensor
    exponents: Tensor | None
    free: FreePages
    positions: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def page_slots(self) -> int:
        """Slots of a page."""
        return self.pages.shape[2]


class Decisions(NamedTuple):
    """Source of the eviction decisions.

    Attributes:
        source: NEVER, ALWAYS (a plain window), EVICTION_CHANNEL (a query channel), SIGNAL (given
            bits) or CHOSEN (by `choose`, after the previous step).
        shift: Distance from a token to the decision that governs it, 0 .. w + 1.
        channel: Eviction channel of the first head of a query group, 0 .. d - 1.
        scale: Factor on the activation of the eviction channel.
        offset: Subtracted from the scaled activation; a positive result evicts.
        clear: Set the eviction channel to 0 before RoPE.
        clear_after_rope: Set it to 0 after RoPE as well.
    """

    source: int
    shift: int = 0
    channel: int = 0
    scale: float = 1.0
    offset: float = 0.0
    clear: bool = False
    clear_after_rope: bool = False

    @classmethod
    def of(cls, spec: MethodSpec, head_size: int) -> Decisions:
        """Return the decisions of a model trained with `spec`."""
        return cls(
            source=EVICTION_CHANNEL,
            shift=spec.governing_shift,
            channel=spec.channel % head_size,
            scale=spec.alpha_scale,
            offset=spec.alpha_offset,
            clear=True,
            clear_after_rope=spec.clear_after_rope,
        )


class Choice(NamedTuple):
    """Rule that selects the token to evict after a step; of equal scores, the latest token.

    Attributes:
        kind: SUMMED evicts the lowest sum of attention received, if there are more than `limit`
            tokens, but none of the newest `recent` tokens. LEAST is the same with the attention of
            the newest query alone. DECAYED is the same with the age of a token times the number
            that it brought. OLDEST evicts the first token from position `limit` on, once
            `recent` tokens follow it, the next token included.
        limit: Integers [b].
        recent: Integers [b].
        reduce: How the scores of a query group are combined: MEAN, MAXIMUM or SUM.
        together: Whether all KV heads share one score, and hold the same positions in the same
            slots.
    """

    kind: int
    limit: Tensor
    recent: Tensor
    reduce: int = MEAN
    together: bool = False


class Step(NamedTuple):
    """One token per sequence that enters one layer. The inner two dimensions are contiguous.

    Attributes:
        query: [b, h * g, d] before RoPE.
        key: [b, h, d] before RoPE.
        value: [b, h, d].
        cos: [b, d], both halves equal.
        sin: [b, d], both halves equal.
        position: Integers [b], position of the token in its sequence.
        rows: Integers [b], cache rows, all different; -1 for an unused batch slot.
        signal: bool [b, h] for SIGNAL, whether the governed token is evicted.
        sinks: Logits [h * g] in the denominators of the heads; None for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    position: Tensor
    rows: Tensor
    signal: Tensor | None = None
    sinks: Tensor | None = None


class HeadNorms(NamedTuple):
    """RMSNorm of the query and key heads, as in Qwen3.

    Attributes:
        query: [d], weight for the query heads.
        key: [d], weight for the key heads.
        epsilon: Added to the mean of the squares.
    """

    query: Tensor
    key: Tensor
    epsilon: float


class AttentionTuning(NamedTuple):
    """Launch parameters of the attention kernel.

    Attributes:
        tile: Slots loaded at a time, a power of two.
        warps: Warps of a program.
        stages: Tiles in flight.
        per_sm: Programs per multiprocessor.
        registers: Most registers of a thread; None for no limit.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 2
    registers: int | None = None


class AttentionWorkspace(NamedTuple):
    """Scratch memory of one step, reused by all layers; its addresses are fixed for CUDA graphs.

    Attributes:
        parts: float32 [programs + b * h, g, d], sums of values before the division.
        weights: float32 [programs + b * h, 2, g], peak score and sum of weights of each part.
        arrived: int32 [b * h], number of finished parts; 0 between launches.
        programs: Programs to launch.
        tuning: Remaining launch parameters.
    """

    parts: Tensor
    weights: Tensor
    arrived: Tensor
    programs: int
    tuning: AttentionTuning


class SlotLogits(NamedTuple):
    """Scores of the slots in a step; the weight of a slot is 2 ** (logit - total).

    Attributes:
        logits: float32 [b * h, g, at least the longest KV list], scores in base-2 logarithms.
        totals: float32 [b * h, g], logarithm of the sum of their powers of two.
    """

    logits: Tensor
    totals: Tensor


class PageBudget(NamedTuple):
    """Number of pages that a query head reads. A page here is `multiple` pages of the cache.

    Attributes:
        pages: Integers [b], for each query head, at least 1.
        multiple: Neighbouring pages of the cache that count as one page.
        last: Whether the page of the newest token is always read.
    """

    pages: Tensor
    multiple: int
    last: bool


class PageSelection(NamedTuple):
    """Selected pages of one step, reused by all layers; its addresses are fixed for CUDA graphs.

    Attributes:
        scores: float32 [b * h, g, pages of several], upper bound of the scores in each page.
        table: int32 [b, h, p], pages that are read.
        heads: int32 [b, h, p], bit i of an entry is set if head i of the query group reads it.
        lengths: int32 [b, h], slots in these pages.
    """

    scores: Tensor
    table: Tensor
    heads: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, sequences: int, cache: PagedCache, group: int, multiple: int) -> PageSelection:
        """Allocate memory for a step.

        Args:
            sequences: Sequences of the step.
            cache: Cache whose pages are selected.
            group: Query heads per KV head.
            multiple: As in `PageBudget`.
        """
        _, h, p = cache.table.shape
        put: dict[str, Any] = {"device": cache.table.device}
        table, heads = torch.zeros(2, sequences, h, p, dtype=torch.int32, **put)
        return cls(
            scores=torch.empty(sequences * h, group, -(-p // multiple), **put),
            table=table,
            heads=heads,
            lengths=torch.zeros(sequences, h, dtype=torch.int32, **put),
        )


class NewestTokens(NamedTuple):
    """Newest tokens of the KV lists of a layer before merging; token t is entry t % m.

    Attributes:
        key: [r, h, m, d], before RoPE, with the eviction channel cleared.
        value: [r, h, m, d].
        weights: float32 [r, h, m, 2]: 1 if the token was merged into its predecessor's slot, else
            0; and its importance.
    """

    key: Tensor
    value: Tensor
    weights: Tensor


class MergeRule(NamedTuple):
    """Rule by which DMC decides about merges and weighs the merged tokens.

    Attributes:
        channel: Eviction channel, 0 .. d - 1.
        scale: Factor on the key's activation in this channel, which decides.
        offset: Subtracted from it; a positive result merges.
        importance_offset: Added to the mean activation of the query group; its sigmoid is the
            weight.
        smallest: Added to the sigmoid.
        uniform: Whether all tokens have weight 1.
    """

    channel: int
    scale: float
    offset: float
    importance_offset: float
    smallest: float
    uniform: bool
