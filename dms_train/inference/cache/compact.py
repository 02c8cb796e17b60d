"""KV cache that holds the live tokens only.

Every (layer, sequence, KV head) owns a list of pages. Its live tokens fill the slots of that list
from the front without holes: an arriving token takes the slot of an evicted one. If more tokens are
evicted than arrive, the last ones move into the free slots, and empty pages at the end are
released. Rows and snapshots may share pages; a shared page is copied before it changes.

Shape letters: b sequences, h KV heads, n arriving tokens, p pages, s slots, d head size.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import Attended, HostDrivenCache, UnrotatedTokens
from dms_train.inference.cache.policy_hooks import (
    balances,
    by_group,
    join,
    merged,
    narrowed,
    observes,
    received,
    second_query,
)
from dms_train.inference.cache.policy_state import PolicyState
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.cache.pool_attention import attend_chosen, attend_pages, pages_of
from dms_train.inference.policies.base import CachePolicy, NewTokens, RequestSizes, Sequences, Slots
from dms_train.kernels.decode.slots import attend_slots


def _pages(slots: Tensor, page_slots: int) -> Tensor:
    return (slots + page_slots - 1) // page_slots


class CompactCache(HostDrivenCache):
    """KV cache in pages of one pool; a policy decides which tokens are kept.

    Args:
        pool: Pool of the pages.
        policy: Policy; its `state_width` is that of the pool.
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
        frequency: RoPE frequencies of the layers, [layers, d / 2]; for policies that move keys.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: CachePolicy,
        *,
        layers: int,
        rows: int,
        heads: int,
        frequency: Tensor | None = None,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.rows = rows
        empty = torch.full((rows, heads, 0), -1, dtype=torch.int64, device=pool.device)
        self._tables = [empty.clone() for _ in range(layers)]
        self._lengths = torch.zeros(layers, rows, heads, dtype=torch.int64, device=pool.device)
        self._state = PolicyState(
            policy, layers=layers, rows=rows, device=pool.device, frequency=frequency
        )

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of the pool's slabs, of page tables and of the policy's state."""
        return self.pool.allocated_bytes + self.table_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes ever taken."""
        return self.pool.peak_bytes + self.table_bytes

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot of one KV head."""
        return self.pool.slot_bytes

    @property
    def max_pages(self) -> int | None:
        """Return the pages of the pool at its largest; None without a limit."""
        return self.pool.max_pages

    @property
    def table_bytes(self) -> int:
        """Return the bytes of tables and of the policy's state."""
        tables = sum(table.numel() for table in self._tables)
        return (tables + self._lengths.numel()) * 8 + self._state.nbytes

    @property
    def policy_bytes(self) -> int:
        """Return the bytes of the policy's state outside the slots, for all rows."""
        return self._state.nbytes

    def live(self, rows: Tensor) -> Tensor:
        """Return the live tokens, int64 [layers, b, h]."""
        return self._lengths[:, rows]

    def held_slots(self, rows: Tensor) -> Tensor:
        """Return the slots of the pages held, int64 [layers, b, h]."""
        return _pages(self._lengths[:, rows], self.pool.page_slots) * self.pool.page_slots

    @property
    def used_pages(self) -> int:
        """Return the pages that rows and snapshots hold, shared ones once."""
        return self.pool.allocator.used

    def free_pages(self, least: int) -> float:
        """Return the pages that neither a row nor a snapshot holds; infinite without a limit."""
        return float("inf") if self.max_pages is None else self.max_pages - self.used_pages

    def most_copies(self, row: int, tokens: int) -> int:
        """Return the most shared pages of a row that its next tokens change.

        A decode step changes the stored token and the state of at most one other token. If the
        policy scores or merges tokens, all states may change.
        """
        if not self.pool.allocator.sharing:
            return 0
        policy = self.policy
        few = tokens == 1 and not policy.scored and type(policy).merge is CachePolicy.merge
        most = self._lengths[:, row].numel() if few else None
        pages = chain.from_iterable(table[row].flatten().tolist() for table in self._tables)
        return self.pool.allocator.count_shared(pages, most)

    def snapshot(self, row: int, tokens: int) -> CompactSnapshot:
        """Take a snapshot of a row, which shares its pages."""
        return CompactSnapshot(self, row)

    def positions(self, row: int) -> list[list[Tensor]]:
        """Return the positions of a row's live tokens by layer and head, int64 on the CPU."""
        rows = torch.tensor([row], device=self.pool.device)
        by_layer = []
        for layer in range(len(self._tables)):
            numbers = self._numbers(*self._kv_lists(layer, rows))[0]
            heads = [self.pool.read("position", slots[slots >= 0]).long() for slots in numbers]
            by_layer.append([head.sort().values.cpu() for head in heads])
        return by_layer

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row; keep the cached tokens."""
        self._state.assign(row, sizes)

    def free(self, rows: Tensor) -> None:
        """Release all pages of these rows, int64 [b]."""
        self._state.reset(rows)
        for layer, table in enumerate(self._tables):
            pages = table[rows]
            self.pool.release(pages[pages >= 0])
            table[rows] = -1
            self._lengths[layer, rows] = 0
            longest = int((table >= 0).sum(-1).max())
            self._tables[layer] = table[..., :longest].clone()

    def step(self, layer: int, step: UnrotatedTokens) -> Attended:
        """Run `attend` on tokens before RoPE."""
        query, arrival = self._state.accumulated(layer, step).rotated()
        return self.attend(layer, step.rows, query, arrival, step.sinks)

    def attend(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        arrival: NewTokens,
        sinks: Tensor | None = None,
    ) -> Attended:
        """Store the arriving tokens, drop the evicted ones and compute attention.

        Args:
            layer: Layer number.
            rows: int64 [b], all different.
            query: [b, heads, n, d] with RoPE applied; a token is its own query.
            arrival: The new tokens.
            sinks: Logits [heads] in the denominators; None for none.

        Returns:
            Output and reads. Outputs of padding tokens are unspecified but finite, and they read
            nothing.
        """
        grouped = by_group(query, arrival.key.shape[1])
        sequences = self._state.sequences(layer, rows, arrival.position, grouped)
        table, lengths = self._kv_lists(layer, rows)
        numbers = self._numbers(table, lengths)
        single = arrival.position.shape[1] == 1 and not self.policy.scored
        stored = self._stored(layer, numbers, content=not single or self.policy.needs_content)
        slots = join(stored, arrival)._replace(sequences=sequences)
        slots = slots._replace(state=self.policy.on_store(slots, arrival))
        if single:
            table, lengths = self._write_back(rows, numbers, slots, stored.state, arrival)
            numbers = self._numbers(table, lengths)
            attended = self._attend_stored(slots, numbers, grouped[:, :, :, 0], sinks)
        else:
            assert slots.key is not None
            assert slots.value is not None
            mask = self._mask(slots, arrival.position)
            second = second_query(self.policy, slots, query, arrival.position)
            wide = narrowed(self.policy, slots, mask, grouped)
            output, weights = attend_slots(query, slots.key, slots.value, wide, second, sinks)
            if observes(self.policy):
                slots = slots._replace(state=self.policy.observe(slots, received(weights, mask)))
            self._write_back(rows, numbers, slots, stored.state, arrival)
            attended = Attended(output, wide.any(2).sum((2, 3)))
        self._state.store(layer, rows, sequences.lists)
        if layer == len(self._tables) - 1 and balances(self.policy):
            self._balance(rows, sequences)
        return attended

    def _balance(self, rows: Tensor, sequences: Sequences) -> None:
        """Let the policy decide over all layers where prompts end, then evict again."""
        ends = sequences.ends_prompt
        if not bool(ends.any()):
            return
        rows, end = rows[ends], sequences.end[ends]
        sizes = (sequences.prompt[ends], sequences.limit[ends], sequences.seed[ends])
        ended = Sequences(sequences.layers, end, end, *sizes, {})
        known = self._state.layers(rows)
        self.policy.balance(known, ended)
        for layer, lists in enumerate(known):
            numbers = self._numbers(*self._kv_lists(layer, rows))
            slots = self._stored(layer, numbers, content=True)
            frequency = self._state.frequency(layer)
            slots = slots._replace(sequences=ended._replace(lists=lists, frequency=frequency))
            assert slots.key is not None
            nothing = slots.key[:, :, :0]
            arrival = NewTokens(end[:, None] - 1, nothing, nothing, None)
            self._write_back(rows, numbers, slots, slots.state, arrival)
            self._state.store(layer, rows, lists)

    def _kv_lists(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page table [b, h, p] and lengths [b, h]."""
        return self._tables[layer][rows], self._lengths[layer, rows]

    def _numbers(self, table: Tensor, lengths: Tensor) -> Tensor:
        """Return the slot numbers in the pool, int64 [b, h, s]; -1 after the last live one."""
        size = self.pool.page_slots
        pages = int(_pages(lengths, size).max())
        offset = torch.arange(size, device=table.device)
        numbers = (table[..., :pages, None] * size + offset).flatten(2)
        order = torch.arange(pages * size, device=table.device)
        return torch.where(order < lengths[..., None], numbers, -1)

    def _stored(self, layer: int, numbers: Tensor, *, content: bool) -> Slots:
        pages = pages_of(numbers, self.pool.page_slots)
        chosen = self.pool.by_slab(pages.flatten())
        back = torch.zeros_like(pages).flatten()
        back[chosen.order] = torch.arange(len(chosen.order), device=back.device)

        def read(field: str) -> Tensor:
            values = self.pool.read_pages(field, chosen)
            if not len(values):  # nothing to index
                return values.reshape(*numbers.shape, *values.shape[2:])
            return values.index_select(0, back).view(*numbers.shape, *values.shape[2:])

        position = read("position").long().masked_fill(numbers < 0, -1)
        state = read("state").masked_fill((numbers < 0)[..., None], 0)
        if not content:
            return Slots(layer, position, state)
        return Slots(layer, position, state, read("key"), read("value"))

    def _mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return which slot each query reads inside a chunk, bool [b, h, n, s]."""
        position = slots.position[:, :, None, :]
        mask = (position >= 0) & (position <= at[:, None, :, None])
        return mask if self.policy.scored else mask & ~self.policy.evict_mask(slots, at)

    def _attend_stored(
        self, slots: Slots, numbers: Tensor, query: Tensor, sinks: Tensor | None
    ) -> Attended:
        """Attend from one query per head to the stored tokens.

        Args:
            slots: Slots of the layer before the arriving tokens were stored.
            numbers: Slot numbers, int64 [b, h, s].
            query: [b, h, r, d].
            sinks: Logits [h * r]; None for none.
        """
        kind = type(self.policy)
        chosen, second = None, None
        if (kind.select, kind.position_shift) != (CachePolicy.select, CachePolicy.position_shift):
            stored = self._stored(slots.layer, numbers, content=self.policy.needs_content)
            stored = stored._replace(sequences=slots.sequences)
            chosen = self.policy.select(stored, query)
            newest = stored.position.amax((1, 2))[:, None]
            second = second_query(self.policy, stored, query.flatten(1, 2).unsqueeze(2), newest)
        if chosen is None and second is None:
            output = attend_pages(self.pool, numbers, query, sinks)
            return Attended(output.flatten(1, 2).unsqueeze(2), (numbers >= 0).sum(-1))
        held = (numbers >= 0)[:, :, None].expand(-1, -1, query.shape[2], -1)
        chosen = held if chosen is None else chosen & held
        return attend_chosen(self.pool, numbers, chosen, query, second)

    def _write_back(
        self, rows: Tensor, numbers: Tensor, slots: Slots, before: Tensor, arrival: NewTokens
    ) -> tuple[Tensor, Tensor]:
        """Drop the evicted tokens and store the rest. Returns the new page table and lengths.

        Args:
            rows: int64 [b].
            numbers: Slot numbers of the stored tokens, int64 [b, h, old s].
            slots: Stored and arriving tokens, s of them.
            before: State of the stored tokens in the pool, [b, h, old s, w].
            arrival: The arriving tokens.
        """
        newest = arrival.position.amax(1, keepdim=True)
        held = slots.position >= 0
        evicted = held & self.policy.evict_mask(slots, newest)[:, :, 0]
        old = numbers.shape[-1]
        changed = torch.zeros_like(evicted)
        changed[..., :old] = (slots.state[..., :old, :] != before).any(-1)
        merge = self.policy.merge(slots, evicted)
        if merge is not None:
            slots, targets = merged(slots, merge)
            changed = changed | targets
        keep = held & ~evicted
        lengths = keep.sum(-1)
        order = torch.arange(keep.shape[-1], device=keep.device)
        filled = order < lengths[..., None]
        stays = keep & filled & (order < old)
        self._grow(slots.layer, rows, lengths)
        if self.pool.allocator.sharing:
            self._own(slots.layer, rows, (filled & ~stays) | (stays & changed))
            numbers = self._numbers(*self._kv_lists(slots.layer, rows))
        table = self._tables[slots.layer][rows]
        self._rewrite(numbers, slots, (stays & changed)[..., :old], content=merge is not None)
        # every KV list has as many unplaced tokens as free slots, in the same order
        unplaced = (keep & ~stays).nonzero(as_tuple=True)
        list_b, list_h, free_slot = (filled & ~stays).nonzero(as_tuple=True)
        size = self.pool.page_slots
        target = table[list_b, list_h, free_slot // size] * size + free_slot % size
        self._move(numbers, slots, unplaced, target, arrival)
        self._shrink(slots.layer, rows, lengths)
        return self._kv_lists(slots.layer, rows)

    def _rewrite(self, numbers: Tensor, slots: Slots, changed: Tensor, *, content: bool) -> None:
        """Write the policy's changes back to the slots that stay, bool [b, h, old s]."""
        if not bool(changed.any()):
            return
        fields = ("position", "state", "key", "value") if content else ("state",)
        old = numbers.shape[-1]
        values = {field: getattr(slots, field)[:, :, :old][changed] for field in fields}
        self.pool.write(numbers[changed], values)

    def _move(
        self,
        numbers: Tensor,
        slots: Slots,
        source: tuple[Tensor, ...],
        target: Tensor,
        arrival: NewTokens,
    ) -> None:
        """Copy tokens at `source` (b, h, s) to the slot numbers `target`, int64 [tokens]."""
        b, h, s = source
        old = numbers.shape[-1]
        new = s >= old
        number = torch.full_like(s, -1)
        number[~new] = numbers[b[~new], h[~new], s[~new]]
        fields = {"position": slots.position[source], "state": slots.state[source]}
        for field in ("key", "value"):
            known = getattr(slots, field)
            if known is None:
                values = self.pool.read(field, number)
                values[new] = getattr(arrival, field)[b[new], h[new], s[new] - old].to(values.dtype)
            else:
                values = known[source]
            fields[field] = values
        self.pool.write(target, fields)

    def _own(self, layer: int, rows: Tensor, written: Tensor) -> None:
        """Copy shared pages before some of their slots, bool [b, h, s], are written."""
        table, size = self._tables[layer][rows], self.pool.page_slots
        slots = table.shape[-1] * size
        room = F.pad(written, (0, max(0, slots - written.shape[-1])))[..., :slots]
        copied = room.view(*table.shape, size).any(-1) & self.pool.shared(table)
        if bool(copied.any()):
            table[copied] = self.pool.unshare(table[copied])
            self._tables[layer][rows] = table

    def _grow(self, layer: int, rows: Tensor, lengths: Tensor) -> None:
        """Add pages to the page tables for `lengths` [b, h] tokens."""
        size = self.pool.page_slots
        need, have = _pages(lengths, size), _pages(self._lengths[layer, rows], size)
        missing = int(need.max()) - self._tables[layer].shape[-1]
        if missing > 0:
            self._tables[layer] = F.pad(self._tables[layer], (0, missing), value=-1)
        table = self._tables[layer][rows]
        column = torch.arange(table.shape[-1], device=table.device)
        fresh = (column >= have[..., None]) & (column < need[..., None])
        if bool(fresh.any()):
            table[fresh] = self.pool.allocate(int(fresh.sum()))
            self._tables[layer][rows] = table

    def _shrink(self, layer: int, rows: Tensor, lengths: Tensor) -> None:
        """Set the lengths [b, h] and release the pages after them."""
        self._lengths[layer, rows] = lengths
        table = self._tables[layer][rows]
        column = torch.arange(table.shape[-1], device=table.device)
        spare = (column >= _pages(lengths, self.pool.page_slots)[..., None]) & (table >= 0)
        if bool(spare.any()):
            self.pool.release(table[spare])
            table[spare] = -1
            self._tables[layer][rows] = table


class CompactSnapshot:
    """Snapshot of a row, which shares the row's pages.

    Args:
        cache: Cache of the row.
        row: The row.
    """

    def __init__(self, cache: CompactCache, row: int) -> None:
        self._cache = cache
        self._tables = [table[row].clone() for table in cache._tables]
        self._lengths = cache._lengths[:, row].clone()
        self._state = cache._state.snapshot(row)
        self._share()

    def restore(self, row: int) -> None:
        """Restore the snapshot into an empty row, which then shares the pages."""
        cache = self._cache
        for layer, stored in enumerate(self._tables):
            table = cache._tables[layer]
            wider = max(table.shape[-1], stored.shape[-1])
            table = F.pad(table, (0, wider - table.shape[-1]), value=-1)
            table[row] = F.pad(stored, (0, wider - stored.shape[-1]), value=-1)
            cache._tables[layer] = table
        cache._lengths[:, row] = self._lengths
        cache._state.restore(row, self._state)
        self._share()

    def release(self) -> None:
        """Release the pages of the snapshot."""
        for table in self._tables:
            self._cache.pool.release(table[table >= 0])
        self._tables, self._state = [], []

    def _share(self) -> None:
        for table in self._tables:
            self._cache.pool.share(table[table >= 0])
