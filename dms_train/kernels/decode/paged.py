"""A compact cache as the decode kernels see it; everything a step needs is on the device.

A KV list is one (cache row, KV head) of one layer. Its live tokens fill slots 0 .. length - 1 of
its page list without holes, in no particular order. A decode step never releases pages (one token
arrives, at most one is evicted, and its slot is reused), so it only pops pages from the free list.

Shape letters: n pages of a slab, s slots of a page, d head size, r cache rows, h KV heads, p pages
of a full KV list, w window, b sequences of a step, g query heads per KV head.

KV lists may share pages. A step copies a shared page before it stores a token in it, so that it
pops at most one page for each KV list: for a new page or for a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.method.base import MethodSpec

NEVER, ALWAYS, EVICTION_CHANNEL, SIGNAL, CHOSEN = range(5)  # where decisions come from
OLDEST, SUMMED, LEAST = range(3)  # which token of a KV list leaves after a step
MEAN, MAXIMUM, SUM = range(3)  # how query heads make one score
OUT_OF_PAGES, LIST_FULL = 1, 2  # bits of FreePages.fault
FP8 = torch.float8_e4m3fn


class FreePages(NamedTuple):
    """Free pages: a stack in device memory, shared by all layers.

    Attributes:
        numbers: int32 [capacity]; the first `left` are free.
        left: int32 [1].
        fault: int32 [1], OUT_OF_PAGES or LIST_FULL once a token could not be stored. The step
            that raised it is invalid.
        holders: int32 [n], KV lists that hold a page; 1 for a free one. It is 0 if all holders
            have copied a page in the same step; it is then free to be collected. None if pages are
            not shared.
    """

    numbers: Tensor
    left: Tensor
    fault: Tensor
    holders: Tensor | None = None

    @classmethod
    def all_of(cls, pages: int, device: torch.device) -> FreePages:
        """Pages 1 to `pages`, all free."""
        put: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            numbers=torch.arange(pages, 0, -1, **put),
            left=torch.tensor([pages], **put),
            fault=torch.zeros(1, **put),
            holders=torch.ones(pages + 1, **put),
        )


class PagedCache(NamedTuple):
    """One layer.

    A page holds the keys, then the values of its slots. Pages are numbered by their distance from
    the start of `pages`, in pages: where none are shared, more slabs may lie anywhere in memory
    (also before it, with negative numbers) at a multiple of the page size, which kernels need not
    know. Page 0 is never allocated, so that unused entries of the table can be read.

    Attributes:
        pages: [n, 2, s, d], the first slab, in bf16, fp16, fp32 or float8_e4m3fn.
        table: int32 [r, h, p], page numbers.
        lengths: int32 [r, h], live slots.
        ring: int32 [r, h, w + 1]; token t lies in slot `ring[t % (w + 1)] // 2`. If the entry is
            odd, t is evicted when it leaves the window. Only the last w + 1 tokens are in it. With
            CHOSEN, w is 0, and an odd entry is `2 * slot + 1` of any token that is evicted.
        exponents: int8 [r, h, p, 2] for FP8 pages: a stored key is `key * 2**-e`, likewise a value.
        free: Where new pages come from.
        positions: int32 [r, h, p * s], of the token in each slot; None if they are not kept.
        bounds: [n, 2, d], lowest and highest of each channel of the keys of a page, of which no
            token may be evicted; None if they are not kept.
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
    """Where eviction decisions come from.

    Attributes:
        source: NEVER, ALWAYS (a plain window), EVICTION_CHANNEL (a query channel), SIGNAL (given
            bits) or CHOSEN (a kernel of `triton_choose`, after the step before).
        shift: Distance from a token to the decision that governs it, 0 .. w + 1.
        channel: The borrowed channel of the first query head of a group, 0 .. d - 1.
        scale: Factor on the borrowed activation.
        offset: Subtracted from the scaled activation; a positive rest evicts.
        clear: Set the borrowed channel to 0 before RoPE.
        clear_after_rope: And again after it.
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
        """Those of a model trained with `spec`."""
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
    """Which token of a KV list leaves after a step; of equal scores, the latest one.

    Attributes:
        kind: SUMMED: the lowest sum of attention received, if there are more than `limit` tokens,
            but none of the newest `recent` ones. LEAST: likewise, by the attention of the newest
            query alone. OLDEST: the first token from position `limit` on, once `recent` tokens
            follow it with the next one.
        limit: Integers [b].
        recent: Integers [b].
        reduce: How query heads make one score: MEAN, MAXIMUM or SUM.
        together: Whether all KV heads have one score, and the same positions in the same slots.
    """

    kind: int
    limit: Tensor
    recent: Tensor
    reduce: int = MEAN
    together: bool = False


class Step(NamedTuple):
    """One token per sequence entering one layer. The inner two dimensions are contiguous.

    Attributes:
        query: [b, h * g, d] before RoPE.
        key: [b, h, d] before RoPE.
        value: [b, h, d].
        cos: [b, d], both halves alike.
        sin: [b, d].
        position: Integers [b] of the token in its sequence.
        rows: Integers [b], cache rows, all different; -1 for a place in the batch that is not used.
        signal: bool [b, h], whether the governed token is evicted, for SIGNAL.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    position: Tensor
    rows: Tensor
    signal: Tensor | None = None


class HeadNorms(NamedTuple):
    """RMSNorm of the query and key heads, as in Qwen3.

    Attributes:
        query: [d], its weight.
        key: [d], likewise.
        epsilon: Added to the mean of the squares.
    """

    query: Tensor
    key: Tensor
    epsilon: float
