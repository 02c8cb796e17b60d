"""Survivors of a stretch of tokens, copied behind each other into the pages of their KV head.

Shape letters: b sequences, h KV heads, s tokens of the stretch, p pages, d head size. A lane is a
(sequence, KV head).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens between two places at which the number of survivors before it is known.
EDGE = 64
# Edges that one step of the counting kernel handles.
_COUNTED = 128


class Pages(NamedTuple):
    """Where the token lists of all lanes lie. Slot x of a lane is slot x % s of its page x // s.

    A page holds the keys, then the values of its s slots. Pages are numbered by their distance
    from the start of `pages`, in pages; they may lie outside of that tensor, in another slab.

    Attributes:
        pages: [n, 2, s, d]; s is a power of two.
        table: int32 [b, h, p], page numbers.
        lowest: A number that no page is below.
    """

    pages: Tensor
    table: Tensor
    lowest: int = 0


class Stretch(NamedTuple):
    """Which tokens of a stretch stay.

    Attributes:
        evicted: bool [b, h, s] by key.
        edges: int32 [b, h, ceil(s / EDGE) + 1], length of a lane's list when all survivors before
            token EDGE * index have been added to it.
        start: int32 [b], first token that exists.
        stop: int32 [b], one behind the last token that exists.
        kept: Tokens before `stop` that stay whatever was decided.
    """

    evicted: Tensor
    edges: Tensor
    start: Tensor
    stop: Tensor
    kept: int

    @property
    def lengths(self) -> Tensor:
        """Length of each list with all survivors in it, int32 [b, h]."""
        return self.edges[..., -1]


@triton.jit
def _survives(evicted, tokens, start, stop, kept, s):
    """Whether tokens of a lane stay; `evicted` points at its first one."""
    real = (tokens >= start) & (tokens < stop)
    marked = tl.load(evicted + tokens, mask=tokens < s, other=1) != 0
    return real & ((tokens >= stop - kept) | (marked == 0))


@triton.jit(do_not_specialize=["heads", "s", "kept"])
def _count_kernel(
    evicted, before, edges, start, stop, heads, s, kept, EDGE: tl.constexpr, COUNTED: tl.constexpr
):
    """Edges of one lane."""
    lane = tl.program_id(0)
    first = tl.load(start + lane // heads)
    last = tl.load(stop + lane // heads)
    count = tl.load(before + lane)
    blocks = tl.cdiv(s, EDGE)
    places = tl.arange(0, COUNTED)
    tokens = places[:, None] * EDGE + tl.arange(0, EDGE)[None, :]
    lane_evicted = evicted + lane.to(tl.int64) * s
    lane_edges = edges + lane * (blocks + 1)
    for block in range(0, blocks, COUNTED):
        stays = _survives(lane_evicted, block * EDGE + tokens, first, last, kept, s)
        found = tl.sum(stays.to(tl.int32), 1)
        running = count + tl.cumsum(found, 0)
        tl.store(lane_edges + block + places, running - found, mask=block + places < blocks)
        count += tl.sum(found, 0)
    tl.store(lane_edges + blocks, count)


@triton.jit
def _copy_rows(
    source, stride, tokens, stays, pages, table, slots, used, half,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy tokens that stay to one half of a lane's used slots; the other used slots become 0."""
    channels = tl.arange(0, PADDED)
    real = channels < D
    page = tl.load(table + slots // PAGE, mask=used, other=0).to(tl.int64) * 2 + half
    values = tl.load(
        source + tokens.to(tl.int64)[:, None] * stride + channels,
        mask=stays[:, None] & real,
        other=0.0,
    )
    at = pages + (page * PAGE + slots % PAGE)[:, None] * D + channels
    tl.store(at, values, mask=used[:, None] & real)


@triton.jit(do_not_specialize=["heads", "s", "places", "kept"])
def _pack_kernel(
    key, value, pages, table, evicted, edges, start, stop, key_strides, value_strides,
    heads, s, places, kept,
    PAGE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Copy the survivors of one block of one lane; one block behind the last clears a page's end."""
    block = tl.program_id(0)
    lane = tl.program_id(1)
    b, h = lane // heads, lane % heads
    blocks = tl.cdiv(s, EDGE)
    count = tl.load(edges + lane * (blocks + 1) + block)
    table += lane * places
    here = tl.arange(0, EDGE)
    value += b.to(tl.int64) * value_strides[0] + h * value_strides[1]
    if block < blocks:
        tokens = block * EDGE + here
        first, last = tl.load(start + b), tl.load(stop + b)
        stays = _survives(evicted + lane.to(tl.int64) * s, tokens, first, last, kept, s)
        slots = count + tl.cumsum(stays.to(tl.int32), 0) - 1
        key += b.to(tl.int64) * key_strides[0] + h * key_strides[1]
        _copy_rows(key, key_strides[2], tokens, stays, pages, table, slots, stays, 0,
                   PAGE, D, PADDED)  # fmt: skip
        _copy_rows(value, value_strides[2], tokens, stays, pages, table, slots, stays, 1,
                   PAGE, D, PADDED)  # fmt: skip
    else:
        end = tl.cdiv(count, PAGE) * PAGE
        for slot in range(count, end, EDGE):
            slots = slot + here
            _copy_rows(value, 0, here, here < 0, pages, table, slots, slots < end, 1,
                       PAGE, D, PADDED)  # fmt: skip


def count_survivors(
    evicted: Tensor,
    before: Tensor,
    *,
    kept: int = 0,
    start: Tensor | None = None,
    stop: Tensor | None = None,
) -> Stretch:
    """Say which tokens of a stretch stay, and how long each list gets.

    Args:
        evicted: bool [b, h, s] by key.
        before: int32 [b, h], length of the lists before the stretch.
        kept: The last tokens, which stay whatever was decided.
        start: int32 [b], first token that exists; None for 0.
        stop: int32 [b], one behind the last token that exists; None for s.
    """
    b, h, s = evicted.shape
    evicted = evicted.contiguous()
    start = torch.zeros(b, dtype=torch.int32, device=evicted.device) if start is None else start
    stop = torch.full_like(start, s) if stop is None else stop
    blocks = triton.cdiv(s, EDGE)
    edges = torch.empty(b, h, blocks + 1, dtype=torch.int32, device=evicted.device)
    counted = min(_COUNTED, triton.next_power_of_2(blocks))
    _count_kernel[(b * h,)](
        evicted.view(torch.uint8), before.contiguous(), edges, start, stop, h, s, kept,
        EDGE=EDGE, COUNTED=counted, num_warps=8,
    )  # fmt: skip
    return Stretch(evicted, edges, start, stop, kept)


def pack_survivors(key: Tensor, value: Tensor, stretch: Stretch, pages: Pages) -> None:
    """Write the survivors of a stretch behind each lane's list, in the order of their positions.

    Values behind the list become 0 up to the end of its last page, so that a kernel may multiply
    them by 0.

    Args:
        key: [b, h, s, d]; d lies densely.
        value: Likewise.
        stretch: Which tokens stay.
        pages: Room for all of them.
    """
    b, h, s, d = key.shape
    grid = (triton.cdiv(s, EDGE) + 1, b * h)
    _pack_kernel[grid](
        key, value, pages.pages, pages.table, stretch.evicted.view(torch.uint8), stretch.edges,
        stretch.start, stretch.stop, key.stride()[:3], value.stride()[:3],
        h, s, pages.table.shape[-1], stretch.kept,
        PAGE=pages.pages.shape[2], D=d, PADDED=triton.next_power_of_2(d), EDGE=EDGE, num_warps=4,
    )  # fmt: skip


def fresh_pages(key: Tensor, slots: int, page_slots: int) -> Pages:
    """Pages of their own for `slots` tokens of each lane of `key` [b, h, s, d]."""
    b, h, _, d = key.shape
    places = max(1, triton.cdiv(slots, page_slots))
    pages = key.new_empty(b * h * places, 2, page_slots, d)
    numbers = torch.arange(b * h * places, dtype=torch.int32, device=key.device)
    return Pages(pages, numbers.view(b, h, places))
