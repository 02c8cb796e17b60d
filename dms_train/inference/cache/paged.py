"""Compact cache on a GPU: a decode step takes two kernels per layer, and the host never waits.

The cache holds the same tokens as `CompactCache`. It serves policies that decide about a token by
the time it leaves the window; only tokens in the window need a position. The kernels of
`kernels.prefill` compute prompts. An FP8 cache lends them extra pages in the model's dtype. Pages
are claimed and released on the device as well. All memory is taken once.

Shape letters: b sequences, h KV heads, n arriving tokens, p pages, s slots, w window, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.linear_states import LinearStates
from dms_train.inference.cache.page_tables import PageTables
from dms_train.inference.cache.paged_prompt import Chunk
from dms_train.inference.cache.paged_snapshot import PagedSnapshot
from dms_train.inference.cache.shared_pages import EvictingLayers, own_changing_pages
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.cache.wide_pages import WidePages
from dms_train.inference.policies import kernel_rules as rules
from dms_train.inference.policies.base import CachePolicy, NewTokens, RequestSizes, find_kernel_rule
from dms_train.inference.policies.kernel_rules import KernelRule
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import (
    ALWAYS,
    EVICTION_CHANNEL,
    FP8,
    NEVER,
    SIGNAL,
    AttentionWorkspace,
    Decisions,
    HeadNorms,
    PagedCache,
    Step,
)
from dms_train.kernels.prefill.lists import Pages, PrefillChunk, PrefillState, Tokens
from dms_train.method.base import MethodSpec

_SOURCES = {rules.NEVER: NEVER, rules.EVERY: ALWAYS, rules.MARKED: SIGNAL}


class PagedKVCache:
    """Paged cache: KV lists of pages, a ring of the window's slots, and a supported policy.

    Args:
        pool: Pool of the pages; `page_slots` a power of two.
        policy: Policy whose kernel rule is a `WindowRule`.
        sizes: Sizes of the cache.

    Attributes:
        captures_prompts: Whether chunks of prompts may be captured as CUDA graphs.
        decodes_prompts: Whether the last token of a prompt may be computed like a generated one.
        eviction_interval: Number of generated tokens after which the policy's hooks evict. Captured
            decode steps do not compute the last of them. None if the hooks are not used.
        changes_known_pages: Whether decode steps change pages of the window and the last one only.
        states: States of layers with linear attention; None without.
        lists: Page tables and lengths of the KV lists.
    """

    captures_prompts = True
    decodes_prompts = True
    eviction_interval: int | None = None
    changes_known_pages = True
    states: LinearStates | None = None

    def __init__(self, pool: DevicePool, policy: CachePolicy, sizes: CacheSizes) -> None:
        self.pool = pool
        self.policy = policy
        rule = find_kernel_rule(policy)
        assert not isinstance(rule, str)
        self._rule, window = self._decisions_for(rule)
        layers, rows, heads = kv_lists = sizes[:3]
        max_pages = -(-sizes.longest // pool.page_slots)
        self.lists = PageTables(pool, layers=layers, rows=rows, heads=heads, places=max_pages)
        self._rings = torch.zeros(*kv_lists, window + 1, dtype=torch.int32, device=pool.device)
        self._exponents: Tensor | None = None  # None unless pages hold FP8
        self._wide: WidePages | None = None
        if pool.pages.dtype == FP8:
            self._exponents = torch.zeros(*kv_lists, max_pages, 2, dtype=torch.int8).to(pool.device)
            self._wide = WidePages(pool, heads=heads, places=max_pages)
        self._layers = torch.arange(layers, device=pool.device)
        self._recording = False
        self._reserves = True  # pages, in each step
        self._memory: dict[int, AttentionWorkspace] = {}  # key: sequences of a step

    def _decisions_for(self, rule: KernelRule) -> tuple[Decisions, int]:
        """Return the eviction rule for tokens that leave the window, and the window."""
        assert isinstance(rule, rules.WindowRule)
        return Decisions(_SOURCES[rule.evicts], shift=rule.shift), rule.window

    @property
    def capturable(self) -> PagedKVCache:
        """Return this cache: the kernels compute its decode steps without the host."""
        return self

    @property
    def device(self) -> torch.device:
        """Return the device of the pages."""
        return self.pool.device

    @property
    def shares_pages(self) -> bool:
        """Return whether any page may have several holders."""
        return self.pool.sharing

    @property
    def reserved_pages(self) -> int:
        """Return the pages that were reserved or taken since the beginning."""
        return self.pool.reserved

    def sync_free_count(self, left: int, fault: int, reserved: int) -> None:
        """Update the number of free pages from an earlier step; see `DevicePool`."""
        self.pool.sync_free_count(left, fault, reserved)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of the pages in use and of the tables."""
        return self.used_pages * self.pool.page_bytes + self.table_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most of these bytes after any step."""
        return self.pool.peak_pages * self.pool.page_bytes + self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the page tables, and of the extra pages for prompts."""
        tables = (self.lists.tables, self.lists.lengths, self._rings, self._exponents)
        wide = 0 if self._wide is None else self._wide.nbytes
        return wide + self.policy_bytes + sum(x.nbytes for x in tables if x is not None)

    @property
    def policy_bytes(self) -> int:
        """Return the bytes of the policy's state outside the pages, for all rows."""
        return sum(x.nbytes for x in self._policy_tensors())

    def _policy_tensors(self) -> list[Tensor]:
        return []

    @property
    def snapshot_bytes(self) -> int:
        """Return the most bytes that a snapshot takes in addition to its pages."""
        copied = [*self._row_tensors(), *self._page_tensors()]
        return sum(x.nbytes // x.shape[1] for x in copied)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot of one KV head."""
        return self.pool.slot_bytes

    @property
    def max_pages(self) -> int:
        """Return the pages of the pool."""
        return self.pool.max_pages

    @property
    def used_pages(self) -> int:
        """Return the pages that rows and snapshots hold, shared ones once."""
        return self.pool.used_pages

    def free_pages(self, least: int) -> float:
        """Return the number of free pages; a lower bound from `least` on."""
        return self.pool.free_pages(least)

    def most_copies(self, row: int, tokens: int) -> int:
        """Return the shared pages of a row; 0 for one token, which takes or copies one page."""
        if not self.pool.sharing:  # no page has several holders now
            self.lists.note_empty(row)
        return 0 if tokens == 1 else self.lists.shared_pages[row]

    def snapshot(self, row: int, tokens: int) -> PagedSnapshot:
        """Take a snapshot of a row, which shares its pages; wait if tokens may be evicted."""
        rule = find_kernel_rule(self.policy)
        held = isinstance(rule, rules.WindowRule) and rule.keeps_all(tokens)
        return PagedSnapshot(
            self.lists,
            row,
            tokens=tokens if held else None,
            row_tensors=self._row_tensors(),
            place_tensors=self._page_tensors(),
        )

    def live(self, rows: Tensor) -> Tensor:
        """Return the live tokens, int64 [layers, b, h]."""
        return self.lists.lengths[:, rows].long()

    def held_slots(self, rows: Tensor) -> Tensor:
        """Return the slots of the pages held, int64 [layers, b, h]."""
        return self.lists.pages(self.live(rows)) * self.pool.page_slots

    def view(self, layer: int) -> PagedCache:
        """Return one layer in the form that the kernels take."""
        exponents = None if self._exponents is None else self._exponents[layer]
        kv_lists = (self.lists.tables[layer], self.lists.lengths[layer], self._ring(layer))
        return PagedCache(self.pool.pages, *kv_lists, exponents, self.pool.free)

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Do nothing: a `WindowRule` does not depend on the request."""

    def positions(self, row: int) -> list[list[Tensor]] | None:
        """Return None: only tokens in the window have a position."""
        return None

    def free(self, rows: Tensor) -> None:
        """Release all pages of these rows, int64 [b]."""
        self.lists.free(rows)

    def note_empty(self, row: int) -> None:
        """Record that a freed row shares no pages."""
        self.lists.note_empty(row)

    def step(self, layer: int, step: AttentionStep) -> Attended:
        """Store tokens, drop the evicted ones and compute attention.

        A replay of a captured decode step must be announced with `prepare`.

        Args:
            layer: Layer number; layers are visited in order.
            step: The tokens; padding lies after them.

        Returns:
            Output and reads. Outputs of padding tokens are unspecified but finite; they read
            nothing.
        """
        if step.position.shape[1] == 1:
            return self._decode(layer, step)
        query, arrival = self._rotated(layer, step)
        b, n = step.position.shape
        together = b
        if self._wide is not None:
            together = self._wide.sequences(n) if step.begins else 1
        pages, results = self._most_pages(step), []
        for part in map(slice, range(0, b, together), range(together, b + together, together)):
            taken = sum(pages[part])
            given = (step.rows[part], query[part], arrival.of(part))
            chunk = Chunk(*given, taken, step.begins, step.sinks)
            results.append(self._prefill(layer, chunk))
        if len(results) == 1:
            return results[0]
        outputs, reads = zip(*results, strict=True)
        return Attended(torch.cat(outputs), torch.cat(reads))

    def _rotated(self, layer: int, step: AttentionStep) -> tuple[Tensor, NewTokens]:
        """Return queries [b, h * r, n, d] and arriving tokens of a part of prompts, with RoPE."""
        return step.rotated_by_kernel(decides=self._layer_rule(layer).source == SIGNAL)

    def _decode(self, layer: int, step: AttentionStep) -> Attended:
        """Compute one token per sequence; the kernels apply RoPE and decide."""
        b, d = len(step.rows), step.query.shape[-1]
        rule = self._rule_at(layer, step.spec, d)
        signal = None
        if rule.source == SIGNAL:
            decisions = step.decisions()
            assert decisions is not None
            signal = decisions[:, :, 0].contiguous()
        token = Step(
            query=step.query.flatten(1, 3),
            key=step.key.flatten(1, 3),
            value=step.value.flatten(1, 3),
            cos=step.cos.flatten(1),
            sin=step.sin.flatten(1),
            position=step.position[:, 0],
            rows=step.rows,
            signal=signal,
            sinks=step.sinks,
        )
        if layer == 0 and self._reserves:
            self.prepare(b)
        output = self._append_and_attend(layer, token, rule, None)
        return Attended(output.unsqueeze(2), self._read(layer)[step.rows].long())

    def _read(self, layer: int) -> Tensor:
        """Return the slots that the newest tokens have read, int32 [rows, h]."""
        return self.lists.lengths[layer]

    def decode(
        self, layer: int, token: Step, spec: MethodSpec | None, norms: HeadNorms | None
    ) -> Tensor:
        """Compute one token per sequence, inside `recording` or after `prepare`.

        Args:
            layer: Layer number.
            token: The tokens, without signals.
            spec: Spec of a model whose query carries an eviction channel; None for a dense model.
            norms: RMSNorm of every head; None if there is none.

        Returns:
            [b, query heads, d].
        """
        rule = self._rule_at(layer, spec, token.query.shape[-1])
        return self._append_and_attend(layer, token, rule, norms)

    def _append_and_attend(
        self, layer: int, token: Step, rule: Decisions, norms: HeadNorms | None
    ) -> Tensor:
        cache, b = self.view(layer), len(token.rows)
        kernels = dispatch.triton_kernels()
        rotated = kernels.append(token, cache, rule, norms=norms)
        if b not in self._memory:
            evicts = any(self._layer_rule(n).source != NEVER for n in range(self.lists_shape[0]))
            self._memory[b] = kernels.attention_workspace(rotated, cache, evicts=evicts)
        scale = token.query.shape[-1] ** -0.5
        memory = self._memory[b]
        return kernels.attend(rotated, cache, token.rows, scale, memory, sinks=token.sinks)

    def _ring(self, layer: int) -> Tensor:
        """Return the ring of a layer, int32 [rows, h, w + 1]."""
        return self._rings[layer]

    def _layer_rule(self, layer: int) -> Decisions:
        """Return the eviction rule of a layer for tokens that leave its window."""
        return self._rule

    def _rule_at(self, layer: int, spec: MethodSpec | None, head_size: int) -> Decisions:
        """Return `_rule_of` for a layer."""
        return self._rule_of(spec, head_size)

    def _rule_of(self, spec: MethodSpec | None, head_size: int) -> Decisions:
        """Return the source of a step's decisions, and the query channel that it clears.

        Args:
            spec: Spec of a model whose query carries an eviction channel; None for any other.
            head_size: Channels of a query.
        """
        if spec is None:
            return self._rule
        decisions = Decisions.of(spec, head_size)
        source = EVICTION_CHANNEL if self._rule.source == SIGNAL else self._rule.source
        return decisions._replace(source=source, shift=self._rule.shift)

    def _prefill(self, layer: int, tokens: Chunk) -> Attended:
        """Store and attend the next tokens of prompts with the kernels."""
        kernels = dispatch.triton_kernels()
        rows, _, arrival, pages, begins, _ = tokens
        ring, rule = self._ring(layer), self._layer_rule(layer)
        signal = arrival.signal if rule.source == SIGNAL else None
        stored = (self.lists.lengths[layer], ring, rows)
        before, chunk = kernels.plan_prompt(*stored, arrival.position, signal, rule, begins=begins)
        lists, lengths = self.lists.numbers(layer, rows), chunk.lengths.view(-1)
        table = self._allocate(layer, rows, lists, lengths, pages)
        changed = None
        if before.slots is not None and (self.pool.sharing or self._wide is not None):
            size = self.pool.page_slots
            changed = kernels.changed_pages(before.lengths, before.slots, table.shape[-1], size)
            if self.pool.sharing:
                self.lists.copy_on_write(lists, changed.flatten(0, 1))
                table = self.lists.tables[layer, rows]
        content = self._prompt_pages(layer, rows, table, None if begins else before.lengths)
        try:
            output = self._extend_prompt(layer, tokens, chunk, before, content)
        except BaseException:  # `free` finds the pages of a KV list by its length
            self.lists.lengths[layer, rows] = torch.maximum(before.lengths, chunk.lengths)
            raise
        if self._wide is not None and self._exponents is not None:
            exponents = self._exponents[layer, rows]
            self._wide.write(table, exponents, chunk.lengths, changed)
            self._exponents[layer, rows] = exponents
        self.lists.release(lists, lengths)
        evicts = rule.source != NEVER
        reads = kernels.commit_prefill(chunk, before, ring=ring, rows=rows, evicts=evicts)
        return Attended(output, reads)

    def _extend_prompt(
        self, layer: int, tokens: Chunk, chunk: PrefillChunk, before: PrefillState, content: Pages
    ) -> Tensor:
        """Store the kept tokens of a chunk and compute its attention."""
        query, arrival = tokens.query, tokens.arrival
        return dispatch.triton_kernels().extend_prompt(
            Tokens(query, arrival.key, arrival.value),
            chunk,
            before,
            content,
            window=self._ring(layer).shape[-1] - 1,
            scale=query.shape[-1] ** -0.5,
            evicts=self._layer_rule(layer).source != NEVER,
            sinks=tokens.sinks,
        )

    def _prompt_pages(
        self, layer: int, rows: Tensor, table: Tensor, lengths: Tensor | None
    ) -> Pages:
        """Return pages for a chunk of prompts, with the `lengths` [b, h] slots before it."""
        if self._wide is None or self._exponents is None:
            return Pages(self.pool.pages, table)
        if lengths is None:
            return self._wide.empty(len(rows))
        return self._wide.read(table, self._exponents[layer, rows], lengths)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the steps inside; they store nothing and reserve no pages."""
        before = self._recording, self._reserves
        self._recording, self._reserves = True, False
        try:
            yield
        finally:
            self._recording, self._reserves = before

    def status(self) -> list[Tensor]:
        """Return the free pages [1], the fault [1], and the arguments of `counts`, int32 each."""
        return [self.pool.free.left, self.pool.free.fault, self.lists.lengths.view(-1)]

    def counts(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots read by steps and tokens held after them, [..., layers, rows, h] each.

        Args:
            lists: The rest of `status` on the host, [any, ..., layers, rows, h].
        """
        return lists[0], lists[0]

    @property
    def lists_shape(self) -> tuple[int, int, int]:
        """Return the layers, rows and KV heads."""
        layers, rows, heads = self.lists.lengths.shape
        return layers, rows, heads

    def pages_of_steps(self, row: int, steps: int) -> int:
        """Return the most pages that steps of one token each of a row take or copy."""
        copies = self.pool.sharing and row in self.lists.copying
        return self.lists.in_row * (steps if copies else self._pages_of(steps))

    def own_changing_pages(self, rows: list[int], spare: float) -> None:
        """Copy the shared pages that decode steps may change, so that bursts need fewer pages."""
        if self.pool.sharing and self.changes_known_pages:
            own_changing_pages(self.lists, self._evicting_layers(), rows, spare)

    def _evicting_layers(self) -> list[EvictingLayers]:
        every = EvictingLayers(self._layers, self._rings, self._layers)
        return [] if self._rule.source == NEVER else [every]

    def prepare_steps(self, rows: list[int], steps: int) -> None:
        """Reserve pages for steps of one token each of rows."""
        self.pool.reserve(sum(self.pages_of_steps(row, steps) for row in rows))

    def prepare(self, sequences: int, tokens: int = 1) -> None:
        """Reserve slots for `tokens` more tokens of `sequences` sequences, in all layers."""
        self.pool.reserve(sequences * self.lists.in_row * self._pages_of(tokens))

    @contextmanager
    def reserved(self, parts: list[tuple[int, int]]) -> Iterator[None]:
        """Reserve the pages of a forward pass; the steps inside reserve none.

        Args:
            parts: Row and number of tokens of each sequence.
        """
        taken = self.lists.in_row * sum(self._pages_of(tokens) for _, tokens in parts)
        prompts = [row for row, tokens in parts if tokens > 1]
        self.lists.copying.update(row for row in prompts if self.lists.shared_pages[row])
        self.pool.reserve(taken + sum(self.most_copies(row, tokens) for row, tokens in parts))
        self._reserves = False
        try:
            yield
        finally:
            self._reserves = True

    def _allocate(
        self, layer: int, rows: Tensor, lists: Tensor, lengths: Tensor, pages: int
    ) -> Tensor:
        """Allocate pages for lists, reserving `pages` of them first if steps reserve."""
        if self._reserves:
            self.pool.reserve(pages)
        return self.lists.allocate(layer, rows, lists, lengths)

    def _row_tensors(self) -> list[Tensor]:
        """Return the tensors with one entry per row, [layers, rows, ...]."""
        return [self.lists.lengths, self._rings]

    def _page_tensors(self) -> list[Tensor]:
        """Return the tensors with one entry per page, [layers, rows, h, p, ...]."""
        return [x for x in (self.lists.tables, self._exponents) if x is not None]

    def _most_pages(self, step: AttentionStep) -> list[int]:
        """Return the most pages that the tokens of each sequence take in a layer."""
        b, n = step.position.shape
        heads = self.lists.lengths.shape[2]
        return [heads * self._pages_of(length) for length in step.lengths or (n,) * b]

    def _pages_of(self, slots: int) -> int:
        return -(-slots // self.pool.page_slots)
