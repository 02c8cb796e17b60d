"""The compact cache on a GPU: a decode step is two kernels per layer and never asks the host.

It holds what `CompactCache` holds, for policies under which a token's fate is known when it leaves
the window: then only the tokens of the window need a position. Prompts go through the kernels of
`kernels.prefill`, for which the host waits once per layer and chunk to learn how many pages they
take. FP8 pages are read and written with torch operations instead.

Shape letters: b sequences, h KV heads, n arriving tokens, p pages, s slots, w window, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache import paged_prompt as prompt
from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.compact import join
from dms_train.inference.cache.page_slabs import PageSlabs
from dms_train.inference.policies.base import Arrival, CachePolicy, Slots
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.window import WindowPolicy
from dms_train.kernels import decode, prefill
from dms_train.kernels.paged import (
    ALWAYS,
    FP8,
    LANE,
    NEVER,
    SIGNAL,
    Decisions,
    PagedCache,
    Step,
)
from dms_train.kernels.prefill_lists import Pages, Tokens
from dms_train.kernels.slots import attend_slots
from dms_train.method.spec import DMSSpec


def decode_rule(policy: CachePolicy) -> tuple[Decisions, int] | None:
    """How the kernels decide under a policy, and its window; None if they do not know it."""
    if type(policy) is DMSPolicy:
        return Decisions(SIGNAL, shift=policy.shift), policy.window
    if type(policy) is WindowPolicy:
        return Decisions(ALWAYS), policy.window
    if type(policy) is KeepAllPolicy:
        return Decisions(NEVER), 0
    return None


class PagedKVCache:
    """Lanes of pages, a ring of the window's slots, and a policy the kernels know.

    Args:
        pool: Where the pages come from; `page_slots` a power of two.
        policy: One that has a `decode_rule`.
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
    """

    def __init__(
        self, pool: PageSlabs, policy: CachePolicy, *, layers: int, rows: int, heads: int
    ) -> None:
        rule = decode_rule(policy)
        assert rule is not None
        self.pool = pool
        self.policy = policy
        self._rule, window = rule
        put: dict[str, Any] = {"dtype": torch.int32, "device": pool.device}
        self._tables = torch.zeros(layers, rows, heads, 0, **put)
        self._lengths = torch.zeros(layers, rows, heads, **put)
        self._rings = torch.zeros(layers, rows, heads, window + 1, **put)
        self._exponents = torch.zeros(layers, rows, heads, 0, 2, dtype=torch.int8).to(pool.device)
        self._quantised = pool.pages.dtype == FP8
        self._longest = 0  # no lane is longer
        self._memory: dict[int, Any] = {}  # by sequences of a step

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool's slabs and of what describes them now."""
        return self.pool.allocated_bytes + self._table_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever taken."""
        return self.pool.peak_bytes + self._table_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one KV head."""
        return self.pool.slot_bytes

    @property
    def _table_bytes(self) -> int:
        tensors = (self._tables, self._lengths, self._rings, self.pool.free.numbers)
        exponents = self._exponents.numel() if self._quantised else 0
        return sum(x.numel() for x in tensors) * 4 + exponents

    def live(self, rows: Tensor) -> Tensor:
        """Live tokens, int64 [layers, b, h]."""
        return self._lengths[:, rows].long()

    def held_slots(self, rows: Tensor) -> Tensor:
        """Slots of the pages held, int64 [layers, b, h]."""
        return self._pages(self.live(rows)) * self.pool.page_slots

    def view(self, layer: int) -> PagedCache:
        """One layer as the kernels see it."""
        exponents = self._exponents[layer] if self._quantised else None
        lanes = (self._tables[layer], self._lengths[layer], self._rings[layer])
        return PagedCache(self.pool.pages, *lanes, exponents, self.pool.free)

    def free(self, rows: Tensor) -> None:
        """Give back all pages of these rows, int64 [b]."""
        tables = self._tables[:, rows]
        used = self._place() < self._pages(self._lengths[:, rows])[..., None]
        self.pool.release(tables[used])
        self._lengths[:, rows] = 0
        self._longest = int(self._lengths.max())
        self._resize(self._longest)

    def attend(self, layer: int, rows: Tensor, query: Tensor, arrival: Arrival) -> Attended:
        """Store the arrival, drop what is dead and let the queries attend.

        Args:
            layer: Layer number.
            rows: int64 [b], all different.
            query: [b, heads, n, d] with RoPE applied; a token is its own query.
            arrival: The new tokens; padding lies behind them.

        Returns:
            Output and reads. Queries of padding tokens get finite nonsense and read nothing.
        """
        if arrival.position.shape[1] == 1:
            return self._decode(layer, rows, query, arrival)
        if arrival.key.dtype == self.pool.pages.dtype:
            return self._prefill(layer, rows, query, arrival)
        slots = join(self._stored(layer, rows, arrival), arrival)
        slots = slots._replace(state=self.policy.admit(slots, arrival))
        assert slots.key is not None
        assert slots.value is not None
        position = slots.position[:, :, None, :]
        mask = (position >= 0) & (position <= arrival.position[:, None, :, None])
        mask &= ~self.policy.expired(slots, arrival.position)
        output, _ = attend_slots(query, slots.key, slots.value, mask.unsqueeze(2))
        self._settle(rows, slots, arrival.position.amax(1, keepdim=True))
        return Attended(output.to(query.dtype), mask.sum((2, 3)))

    def rule(self, spec: DMSSpec | None, head_size: int) -> Decisions:
        """How a step decides and what it clears from the query.

        Args:
            spec: Of a model whose decisions lie in a query lane; None for any other.
            head_size: Channels of a query.
        """
        if spec is None:
            return self._rule
        lane = Decisions.of(spec, head_size)
        source = LANE if self._rule.source == SIGNAL else self._rule.source
        return lane._replace(source=source, shift=self._rule.shift)

    def step(self, layer: int, step: Step, rule: Decisions) -> Attended:
        """One token per sequence, before RoPE. A replay of it must be announced with `prepare`.

        Args:
            layer: Layer number; layers are visited in order.
            step: The tokens.
            rule: From `rule`.

        Returns:
            Output [b, heads, 1, d] and reads.
        """
        b, _, d = step.query.shape
        if layer == 0 and not _capturing():
            self.prepare(b)
        cache = self.view(layer)
        append, attend = decode.kernels()
        rotated = append.append(step, cache, rule)
        if b not in self._memory:
            self._memory[b] = attend.workspace(rotated, cache)
        output = attend.attend(rotated, cache, step.rows, d**-0.5, self._memory[b])
        return Attended(output.unsqueeze(2), self._lengths[layer, step.rows].long())

    def _decode(self, layer: int, rows: Tensor, query: Tensor, arrival: Arrival) -> Attended:
        """`step` for a token whose query and key have been rotated."""
        still = query.new_ones(len(rows), query.shape[-1])
        signal = None if arrival.signal is None else arrival.signal[:, :, 0].contiguous()
        step = Step(
            query=query[:, :, 0].contiguous(),
            key=arrival.key[:, :, 0].contiguous(),
            value=arrival.value[:, :, 0].contiguous(),
            cos=still,
            sin=torch.zeros_like(still),
            position=arrival.position[:, 0].contiguous(),
            rows=rows,
            signal=signal,
        )
        return self.step(layer, step, self._rule)

    def _prefill(self, layer: int, rows: Tensor, query: Tensor, arrival: Arrival) -> Attended:
        """A chunk of prompts through the kernels."""
        ring = self._rings[layer, rows]
        window, d = ring.shape[-1] - 1, query.shape[-1]
        real = (arrival.position >= 0).int()
        seen = arrival.position[:, 0].int()
        before = prompt.carried(self._lengths[layer, rows], ring, seen, self._rule.source)
        evicted = prompt.evictions(before, arrival.signal, real, self._rule)
        stretch = prefill.plan_chunk(evicted, before, window, real.sum(1, dtype=torch.int32))
        table, spare = self._grow(layer, rows, stretch.lengths)
        slab, first = self.pool.lowest
        tokens, pages = Tokens(query, arrival.key, arrival.value), Pages(slab, table - first)
        output, after = prefill.extend_prompt(
            tokens, stretch, before, pages, window=window, scale=d**-0.5
        )
        self._settled(layer, rows, stretch.lengths, spare=spare)
        if self._rule.source != NEVER:
            self._rings[layer, rows] = prompt.ring_after(after, window + 1)
        return Attended(output, prompt.reads(stretch, before, window))

    def prepare(self, sequences: int) -> None:
        """Have room for one more token of so many sequences in every layer and KV head."""
        layers, _, heads, places = self._tables.shape
        room = places * self.pool.page_slots
        if self._longest == room:
            self._longest = int(self._lengths.max())
        self._longest += 1
        if self._longest > room:
            self._resize(self._longest + self._longest // 4)
        self.pool.reserve(layers * sequences * heads)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a captured step would look for the cache in the wrong place."""
        tensors = (self._tables, self._exponents, self.pool.free.numbers)
        return (self._tables.shape[-1], *(x.data_ptr() for x in tensors))

    def _resize(self, slots: int) -> None:
        """Give the tables places for so many slots."""
        wanted = -(-slots // self.pool.page_slots)
        change = wanted - self._tables.shape[-1]
        self._tables = F.pad(self._tables, (0, change))
        self._exponents = F.pad(self._exponents, (0, 0, 0, change))

    def _pages(self, slots: Tensor) -> Tensor:
        return (slots + self.pool.page_slots - 1) // self.pool.page_slots

    def _place(self) -> Tensor:
        return torch.arange(self._tables.shape[-1], device=self.pool.device)

    def _stored(self, layer: int, rows: Tensor, arrival: Arrival) -> Slots:
        """What is stored, in the dtype of the arrival. Tokens that left the window get position 0.

        They stay for ever, so no one asks for their position again.
        """
        lengths = self._lengths[layer, rows]
        places = int(self._pages(lengths).max())
        table = self._tables[layer, rows][..., :places]
        content = self.pool.read(table.flatten()).view(*table.shape, *self.pool.pages.shape[1:])
        wide = content.to(arrival.key.dtype)
        if self._quantised:
            exponents = self._exponents[layer, rows][..., :places, :, None, None]
            wide = wide * exponents.to(wide.dtype).exp2()
        held = torch.arange(places * self.pool.page_slots, device=table.device) < lengths[..., None]
        pair = wide.movedim(3, 0).flatten(3, 4).masked_fill(~held[..., None], 0)  # [2, b, h, s, d]
        position, marks = held.long() - 1, torch.zeros_like(held, dtype=torch.int64)
        if self._rule.source != NEVER:
            far = torch.iinfo(torch.int64).max
            first = arrival.position.masked_fill(arrival.position < 0, far).amin(1, keepdim=True)
            position, marks = prompt.stored_window(self._rings[layer, rows], held, first - 1)
        state = marks[..., None].expand(*marks.shape, self.policy.state_width)
        return Slots(layer, position, state.to(torch.float32), pair[0], pair[1])

    def _settle(self, rows: Tensor, slots: Slots, newest: Tensor) -> None:
        """Store what survives the newest position, int64 [b, 1], in its order, and nothing else."""
        layer, size = slots.layer, self.pool.page_slots
        keep = (slots.position >= 0) & ~self.policy.expired(slots, newest)[:, :, 0]
        lengths = keep.sum(-1)
        table, spare = self._grow(layer, rows, lengths)
        self._settled(layer, rows, lengths, spare=spare)
        if self._rule.source != NEVER:
            marks = keep if self._rule.source == ALWAYS else slots.state[..., 0] > 0
            ring = self._rings[layer, rows]
            self._rings[layer, rows] = prompt.survivors_ring(
                ring, slots.position, keep, marks, newest
            )
        need = self._pages(lengths)
        places = int(need.max())
        order = keep.int().argsort(stable=True, descending=True)[..., : places * size]
        assert slots.key is not None
        assert slots.value is not None
        pair = torch.stack([slots.key, slots.value], 2)  # [b, h, 2, s, d]
        pair = pair.gather(3, order[:, :, None, :, None].expand(*pair.shape[:3], -1, pair.shape[4]))
        pair = F.pad(pair, (0, 0, 0, places * size - pair.shape[3]))
        dead = torch.arange(places * size, device=keep.device) >= lengths[..., None]
        pair = pair.masked_fill(dead[:, :, None, :, None], 0)
        # [b, h, places, 2, size, d]
        content = pair.view(*pair.shape[:3], places, size, -1).movedim(3, 2)
        used = (self._place() < need[..., None])[..., :places]
        self.pool.write(table[..., :places][used], self._packed(layer, rows, content)[used])

    def _grow(self, layer: int, rows: Tensor, lengths: Tensor) -> tuple[Tensor, bool]:
        """Have pages for `lengths` [b, h]; nothing moves. The host waits for what that takes.

        Returns:
            Page table of the rows, [b, h, p], and whether pages at its end will be left over.
        """
        change = self._pages(lengths) - self._pages(self._lengths[layer, rows])
        missing = change.clamp(min=0)
        asked = torch.stack([lengths.max(), missing.sum(), (change < 0).any()])
        longest, count, spare = asked.tolist()
        self._longest = max(self._longest, longest)
        if self._longest > self._tables.shape[-1] * self.pool.page_slots:
            self._resize(self._longest + self._longest // 4)
        table = self._tables[layer, rows]
        if count:
            have = self._pages(self._lengths[layer, rows])[..., None]
            fresh = (self._place() >= have) & (self._place() < have + missing[..., None])
            place = fresh.flatten().cumsum(0).view(fresh.shape) - 1
            table = torch.where(fresh, self.pool.take(count)[place.clamp(min=0)], table)
            self._tables[layer, rows] = table
        return table, bool(spare)

    def _settled(self, layer: int, rows: Tensor, lengths: Tensor, *, spare: bool) -> None:
        """Set the lengths [b, h] and give back the pages behind them, if there are any."""
        need, have = self._pages(lengths), self._pages(self._lengths[layer, rows])
        self._lengths[layer, rows] = lengths.int()
        if spare:
            place = self._place()
            unused = (place < have[..., None]) & (place >= need[..., None])
            self.pool.release(self._tables[layer, rows][unused])

    def _packed(self, layer: int, rows: Tensor, content: Tensor) -> Tensor:
        """Pages [b, h, p, 2, size, d] as they are stored."""
        if not self._quantised:
            return content.to(self.pool.pages.dtype)
        # the rule of kernels.paged: at most 256, with one power of two to spare
        exponents = (torch.frexp(content.float().abs().amax((4, 5)))[1] - 7).clamp(-99, 101)
        self._exponents[layer, rows, :, : content.shape[2]] = exponents.to(torch.int8)
        return (content.float() * (-exponents.float()).exp2()[..., None, None]).to(FP8)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
