"""Pages of live tokens in torch operations, for the cache of `generate`.

This file is shipped with the weights and needs only torch. Every sequence and KV head of a layer
owns a list of pages. Its live tokens fill the slots of that list from the front without holes: a
new token takes the slot of an evicted one. When more tokens are evicted than arrive, the last
tokens move into the free slots, and empty pages at the end are released.

Shape letters: b sequences, h KV heads, r query heads per KV head, n new tokens, p pages, s slots,
d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pool_dms import PagePool

__all__ = ["Attended", "NewTokens", "Pages", "block_queries", "sink_softmax"]

BLOCK_SCORES = 2**25  # attention scores that are computed at once
BLOCK_QUERIES = 16  # and queries, if that is more


def block_queries(lists: int, keys: int) -> int:
    """Number of queries that attend at once, so that scores [lists, queries, keys] stay small."""
    return max(BLOCK_QUERIES, BLOCK_SCORES // max(1, lists * keys))


def sink_softmax(scores: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute a softmax over the last dimension with exp(sink) in the denominator.

    Args:
        scores: [..., keys].
        sinks: Logits that broadcast to [...]; None for a plain softmax.
        dtype: Dtype of the result.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=dtype)
    column = sinks.to(dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores.to(dtype), column], -1).softmax(-1)[..., :-1]


class NewTokens(NamedTuple):
    """Tokens of a forward pass. The package's kernels read these four fields, too.

    Attributes:
        position: int64 [b, n], rising by 1 from column to column; -1 for padding anywhere.
        key: [b, h, n, d] with RoPE applied.
        value: [b, h, n, d].
        signal: Eviction decisions, bool [b, h, n].
    """

    position: Tensor
    key: Tensor
    value: Tensor
    signal: Tensor


class Attended(NamedTuple):
    """Result of one layer's attention, [b, heads, n, d]; the package's kernels return it, too."""

    output: Tensor


class _Slots(NamedTuple):
    """Tokens of one layer.

    Attributes:
        position: int64 [b, h, s], position in the sequence; -1 for an empty slot.
        marked: float32 [b, h, s], 1 for a token that leaves when the window has passed it.
        key: [b, h, s, d] with RoPE applied; None if it was not read.
        value: [b, h, s, d]; None if it was not read.
    """

    position: Tensor
    marked: Tensor
    key: Tensor | None = None
    value: Tensor | None = None


class Pages:
    """Live tokens of one layer.

    Args:
        pool: Pool that the pages come from.
        window: Distance up to which a token is always read.
        shift: Distance from a token to the decision that governs it.
        rows: Sequences.
        heads: KV heads.
    """

    def __init__(self, pool: PagePool, *, window: int, shift: int, rows: int, heads: int) -> None:
        self.pool = pool
        self.rows = rows
        self.window, self.shift = window, shift
        self._table = torch.full((rows, heads, 0), -1, dtype=torch.int64, device=pool.device)
        self._lengths = torch.zeros(rows, heads, dtype=torch.int64, device=pool.device)

    def queries_at_once(self, lists: int, keys: int) -> int:
        """Most tokens of one `attend`, for this many heads of the batch and keys."""
        return block_queries(lists, keys)

    def live(self, rows: Tensor) -> Tensor:
        """Count the live tokens of these rows: int64 [1, b, h]."""
        return self._lengths[rows][None]

    def free(self, rows: Tensor) -> None:
        """Release all pages of these rows."""
        pages = self._table[rows]
        self.pool.release(pages[pages >= 0])
        self._table[rows], self._lengths[rows] = -1, 0

    def attend(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        tokens: NewTokens,
        sinks: Tensor | None = None,
    ) -> Attended:
        """Store tokens, drop the evicted ones and compute attention.

        The package's kernels have the same signature.

        Args:
            layer: 0.
            rows: All rows in their order.
            query: [b, heads, n, d] with RoPE applied.
            tokens: The new tokens; a token is its own query.
            sinks: Logits [heads] in the denominators; None for none.

        Returns:
            Outputs; those of padding are unspecified but finite.
        """
        numbers = self._numbers()
        single = tokens.position.shape[1] == 1
        stored = self._stored(numbers, content=not single)
        slots = _joined(stored, tokens)
        slots = slots._replace(marked=self._marked(slots, tokens))
        if single:
            self._store(numbers, slots, stored.marked, tokens)
            return Attended(_attend_pages(self.pool, self._numbers(), query, sinks))
        output = _attend_slots(query, slots, self._visible(slots, tokens.position), sinks)
        self._store(numbers, slots, stored.marked, tokens)
        return Attended(output)

    def taken(self, rows: Tensor) -> Pages:
        """Copy these rows, int64 [b], which may repeat, into new pages."""
        return self._copied(rows, None)

    def cropped(self, length: int) -> Pages:
        """Copy the tokens before position `length` into new pages.

        A mark that a later token has set stays until another token at its position replaces it,
        which happens before the mark counts.
        """
        return self._copied(torch.arange(self.rows, device=self.pool.device), length)

    def missing(self, real: Tensor, length: int) -> int:
        """Count the evicted tokens that a later query may read after a crop to `length`.

        Args:
            real: bool [rows, length], False for padding.
            length: Tokens that stay.
        """
        # in the window of the next query, or undecided when it arrives
        first = max(0, length - max(self.window, self.shift))
        position = self._stored(self._numbers(), content=False).position
        held = ((position >= first) & (position < length)).sum(-1)
        return int((real[:, first:length].sum(1)[:, None].to(held.device) - held).sum())

    def _copied(self, rows: Tensor, length: int | None) -> Pages:
        numbers = self._numbers()[rows]
        slots = self._stored(numbers, content=True)
        if length is not None:
            stays = slots.position.masked_fill(slots.position >= length, -1)
            slots = slots._replace(position=stays)
        assert slots.key is not None
        assert slots.value is not None
        b, h, _ = numbers.shape
        copy = Pages(self.pool, window=self.window, shift=self.shift, rows=b, heads=h)
        none = NewTokens(numbers.new_full((b, 1), -1), slots.key, slots.value, slots.marked)
        copy._store(numbers[..., :0], slots, slots.marked[..., :0], none)
        return copy

    def _marked(self, slots: _Slots, tokens: NewTokens) -> Tensor:
        """Mark the tokens whose decision arrives.

        Padding between two new tokens decides as a masked token would; other padding does not.
        """
        real = tokens.position >= 0
        start = real.int().argmax(1, keepdim=True)  # [b, 1]
        base = tokens.position.gather(1, start) - start  # position of the first column
        column = slots.position + self.shift - base[:, :, None]  # of the governing token
        last = real.shape[1] - 1 - real.flip(1).int().argmax(1, keepdim=True)
        inside = (column >= start[:, :, None]) & (column <= last[:, :, None])
        governed = inside & (slots.position >= 0) & real.any(1)[:, None, None]
        decision = tokens.signal.gather(2, column.clamp(0, real.shape[1] - 1))
        return torch.where(governed, decision.to(slots.marked.dtype), slots.marked)

    def _expired(self, slots: _Slots, at: Tensor) -> Tensor:
        """Find the tokens evicted for queries at `at`, int64 [b, n]: bool [b, h, n, s]."""
        late = at[:, None, :, None] - slots.position[:, :, None, :] > self.window
        return late & (slots.marked > 0)[:, :, None, :]

    def _visible(self, slots: _Slots, at: Tensor) -> Tensor:
        """Find the slots that queries at `at`, int64 [b, n], read: bool [b, h, n, s]."""
        position = slots.position[:, :, None, :]
        causal = (position >= 0) & (position <= at[:, None, :, None])
        return causal & ~self._expired(slots, at)

    def _numbers(self) -> Tensor:
        """Slot numbers in the pool, int64 [b, h, s]; -1 after the last live one."""
        size = self.pool.page_slots
        pages = int(_page_count(self._lengths, size).max())
        offset = torch.arange(size, device=self._table.device)
        numbers = (self._table[..., :pages, None] * size + offset).flatten(2)
        order = torch.arange(pages * size, device=self._table.device)
        return torch.where(order < self._lengths[..., None], numbers, -1)

    def _stored(self, numbers: Tensor, *, content: bool) -> _Slots:
        """Read the slots with these numbers, int64 [b, h, s] of whole pages."""
        pages = _pages_of(numbers, self.pool.page_slots)
        chosen = self.pool.by_slab(pages.flatten())
        back = torch.zeros_like(pages).flatten()
        back[chosen.order] = torch.arange(len(chosen.order), device=back.device)

        def read(field: str) -> Tensor:
            values = self.pool.read_pages(field, chosen)
            if not len(values):  # nothing to index
                return values.reshape(*numbers.shape, *values.shape[2:])
            return values.index_select(0, back).view(*numbers.shape, *values.shape[2:])

        position = read("position").long().masked_fill(numbers < 0, -1)
        marked = read("marked").masked_fill(numbers < 0, 0)
        if not content:
            return _Slots(position, marked)
        return _Slots(position, marked, read("key"), read("value"))

    def _store(self, numbers: Tensor, slots: _Slots, before: Tensor, tokens: NewTokens) -> None:
        """Drop the evicted tokens and store the rest.

        Args:
            numbers: Slot numbers of the stored tokens, int64 [b, h, old s].
            slots: Stored and new tokens.
            before: Marks of the stored tokens in the pool, [b, h, old s].
            tokens: The new tokens.
        """
        old = numbers.shape[-1]
        newest = tokens.position.amax(1, keepdim=True)
        keep = (slots.position >= 0) & ~self._expired(slots, newest)[:, :, 0]
        lengths = keep.sum(-1)
        order = torch.arange(keep.shape[-1], device=keep.device)
        filled = order < lengths[..., None]
        stays = keep & filled & (order < old)
        self._grow(lengths)
        changed = stays[..., :old] & (slots.marked[..., :old] != before)
        self.pool.write(numbers[changed], {"marked": slots.marked[..., :old][changed]})
        # every list has as many unplaced tokens as free slots, in the same order
        unplaced = (keep & ~stays).nonzero(as_tuple=True)
        list_b, list_h, place = (filled & ~stays).nonzero(as_tuple=True)
        size = self.pool.page_slots
        target = self._table[list_b, list_h, place // size] * size + place % size
        self._move(numbers, slots, unplaced, target, tokens)
        self._shrink(lengths)

    def _move(
        self,
        numbers: Tensor,
        slots: _Slots,
        source: tuple[Tensor, ...],
        target: Tensor,
        tokens: NewTokens,
    ) -> None:
        """Copy tokens at `source` (b, h, s) to the slot numbers `target`, int64 [tokens]."""
        b, h, s = source
        old = numbers.shape[-1]
        new = s >= old
        number = torch.full_like(s, -1)
        number[~new] = numbers[b[~new], h[~new], s[~new]]
        fields = {"position": slots.position[source], "marked": slots.marked[source]}
        for field in ("key", "value"):
            known = getattr(slots, field)
            if known is None:
                values = self.pool.read(field, number)
                values[new] = getattr(tokens, field)[b[new], h[new], s[new] - old].to(values.dtype)
            else:
                values = known[source]
            fields[field] = values
        self.pool.write(target, fields)

    def _grow(self, lengths: Tensor) -> None:
        """Add pages to the lists for `lengths` [b, h] tokens."""
        size = self.pool.page_slots
        need, have = _page_count(lengths, size), _page_count(self._lengths, size)
        absent = int(need.max()) - self._table.shape[-1]
        if absent > 0:
            self._table = F.pad(self._table, (0, absent), value=-1)
        column = torch.arange(self._table.shape[-1], device=self._table.device)
        fresh = (column >= have[..., None]) & (column < need[..., None])
        if bool(fresh.any()):
            self._table[fresh] = self.pool.allocate(int(fresh.sum()))

    def _shrink(self, lengths: Tensor) -> None:
        """Set the lengths [b, h] and release the pages after them."""
        self._lengths = lengths
        column = torch.arange(self._table.shape[-1], device=self._table.device)
        needed = _page_count(lengths, self.pool.page_slots)
        spare = (column >= needed[..., None]) & (self._table >= 0)
        if bool(spare.any()):
            self.pool.release(self._table[spare])
            self._table[spare] = -1


def _page_count(slots: Tensor, page_slots: int) -> Tensor:
    return (slots + page_slots - 1) // page_slots


def _pages_of(numbers: Tensor, page_slots: int) -> Tensor:
    """Page numbers of slot numbers of whole pages: int64 [b, h, s] to [b, h, p]; -1 for none."""
    return numbers[..., ::page_slots].div(page_slots, rounding_mode="floor")


def _joined(stored: _Slots, tokens: NewTokens) -> _Slots:
    """Stored tokens followed by the new ones."""
    b, h, _ = stored.marked.shape
    n = tokens.position.shape[1]
    position = torch.cat([stored.position, tokens.position[:, None].expand(b, h, n)], 2)
    marked = torch.cat([stored.marked, stored.marked.new_zeros(b, h, n)], 2)
    if stored.key is None or stored.value is None:
        return _Slots(position, marked)
    key = torch.cat([stored.key, tokens.key.to(stored.key.dtype)], 2)
    value = torch.cat([stored.value, tokens.value.to(stored.value.dtype)], 2)
    return _Slots(position, marked, key, value)


def _attend_slots(query: Tensor, slots: _Slots, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute attention over slots; scores and softmax are at least float32.

    Args:
        query: [b, heads, n, d].
        slots: With keys and values.
        visible: bool [b, h, n, s].
        sinks: Logits [heads]; None for none.

    Returns:
        [b, heads, n, d]; finite for a query that reads nothing.
    """
    assert slots.key is not None
    assert slots.value is not None
    b, heads, n, d = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    transposed = slots.key.to(wide).transpose(-1, -2).unsqueeze(2)
    scores = query.reshape(b, visible.shape[1], -1, n, d).to(wide) @ transposed * d**-0.5
    scores = scores.masked_fill(~visible.unsqueeze(2), torch.finfo(wide).min)
    by_head = None if sinks is None else sinks.view(visible.shape[1], -1, 1)
    weights = sink_softmax(scores, by_head, wide).to(slots.value.dtype)
    output = weights @ slots.value.unsqueeze(2)
    return output.reshape(b, heads, n, d)


def _attend_pages(pool: PagePool, numbers: Tensor, query: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute attention of one query per head over all slots of its KV head.

    Pages are multiplied in the order in which the pool reads them; only scores and outputs are
    sorted by sequence.

    Args:
        pool: Pool that holds the slots.
        numbers: Slot numbers of whole pages, int64 [b, h, s]; -1 after the last live one.
        query: [b, heads, 1, d].
        sinks: Logits [heads]; None for none.

    Returns:
        [b, heads, 1, d].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    (b, h, _), d = numbers.shape, query.shape[-1]
    pages = _pages_of(numbers, pool.page_slots)
    columns, size = pages.shape[-1], pool.page_slots
    chosen = pool.by_slab(pages.flatten())
    kv_list = chosen.order.div(max(1, columns), rounding_mode="floor")
    key = pool.read_pages("key", chosen).to(wide)  # [pages, page slots, d]
    scores = query.reshape(b * h, -1, d).to(wide)[kv_list] @ key.transpose(1, 2) * d**-0.5
    r = scores.shape[1]
    by_list = scores.new_zeros(pages.numel(), r, size)
    by_list[chosen.order] = scores
    empty = (numbers < 0).view(b, h, columns, 1, size)
    by_list = by_list.view(b, h, columns, r, size).masked_fill(empty, torch.finfo(wide).min)
    by_head = None if sinks is None else sinks.view(h, r)
    weights = sink_softmax(by_list.transpose(2, 3).flatten(3), by_head, wide)  # [b, h, r, s]
    by_page = weights.view(b, h, r, columns, size).transpose(2, 3).flatten(0, 2)
    value = pool.read_pages("value", chosen)
    parts = by_page[chosen.order].to(value.dtype) @ value
    output = torch.zeros(b * h, r, d, dtype=wide, device=parts.device)
    output.index_add_(0, kv_list, parts.to(wide))
    return output.to(value.dtype).view(b, h * r, 1, d)
