"""Paged cache that keeps every token; a generated token reads selected pages only.

The append kernel keeps the lowest and highest keys of every page. Before the attention of a layer,
two kernels bound the scores of the pages for each query head, and select the best pages
(`kernels.decode.triton_bounds`). The attention reads only these. Prompts read everything.

Shape letters: b sequences, h KV heads, n arriving tokens, p pages, s slots of a page, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_prompt import Chunk
from dms_train.inference.cache.row_requests import RowRequests
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.base import CachePolicy, RequestSizes
from dms_train.inference.policies.kernel_rules import KernelRule, PageRule
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import (
    NEVER,
    Decisions,
    HeadNorms,
    PageBudget,
    PagedCache,
    PageSelection,
    Step,
)

_ALL = 2**30  # number of pages above that of any KV list


class SelectingPagedCache(PagedKVCache):
    """Paged cache with bounds for the keys of its pages.

    Args:
        pool: As for `PagedKVCache`, in the dtype of the model.
        policy: Policy whose kernel rule is a `PageRule`; its pages are whole pages of the pool.
        sizes: Sizes of the cache.
    """

    captures_prompts = False
    changes_known_pages = False  # a copy of a page has no bounds of its keys

    def __init__(self, pool: DevicePool, policy: CachePolicy, sizes: CacheSizes) -> None:
        super().__init__(pool, policy, sizes)
        rule = policy.kernel_rule()
        assert isinstance(rule, PageRule)
        self._page_rule = rule
        self._requests = RowRequests(sizes.layers, sizes.rows, pool.device)
        size = (len(pool.pages), 2, pool.pages.shape[-1])
        self._bounds = torch.zeros(size, dtype=pool.dtype, device=pool.device)
        self._reads = torch.zeros_like(self.lists.lengths)
        self._selections: dict[int, PageSelection] = {}  # key: sequences of a step
        # pages in which the prompts of the current pass change any KV list, by micro-batch
        self._changed: dict[int, range] = {}
        self._micro_batch = 0  # index of the current one
        self._wanted: PageBudget  # belongs to the current step
        self._selection_rows: Tensor  # index of each sequence in the step; -1 for none

    def _decisions_for(self, rule: KernelRule) -> tuple[Decisions, int]:
        """Return the rule that evicts nothing."""
        return Decisions(NEVER), 0

    @property
    def table_bytes(self) -> int:
        """Return the bytes of tables, of the bounds of pages and of the policy's state."""
        return super().table_bytes + self._bounds.nbytes + self._reads.nbytes

    def view(self, layer: int) -> PagedCache:
        """Return one layer in the form that the kernels take."""
        return super().view(layer)._replace(bounds=self._bounds)

    def status(self) -> list[Tensor]:
        """Return the status of `PagedKVCache`, and the slots that were read."""
        return [*super().status(), self._reads.view(-1)]

    def counts(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts of `PagedKVCache`; the first layers read everything."""
        dense = self._page_rule.dense_layers
        whole, some = lists[0][..., :dense, :, :], lists[1][..., dense:, :, :]
        return torch.cat([whole, some], -3), lists[0]

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row; keep the cached tokens."""
        self._requests.assign(row, sizes)

    def _read(self, layer: int) -> Tensor:
        return (self.lists.lengths if layer < self._page_rule.dense_layers else self._reads)[layer]

    def _append_and_attend(
        self, layer: int, token: Step, rule: Decisions, norms: HeadNorms | None
    ) -> Tensor:
        if layer == 0:
            self._plan(token)
        if layer < self._page_rule.dense_layers:
            return super()._append_and_attend(layer, token, rule, norms)
        cache, (b, heads, d) = self.view(layer), token.query.shape
        kernels = dispatch.triton_kernels()
        rotated = kernels.append(token, cache, rule, norms=norms)
        if b not in self._selections:
            group = heads // cache.table.shape[1]
            many = self._wanted.multiple
            self._selections[b] = PageSelection.of(b, cache, group, many)
        if b not in self._memory:
            self._memory[b] = kernels.attention_workspace(rotated, cache)
        chosen = self._selections[b]
        kernels.select_pages(
            rotated, cache, self._bounds, token.rows, self._wanted, chosen, self._reads[layer]
        )
        some = cache._replace(table=chosen.table, lengths=chosen.lengths)
        output = kernels.attend(
            rotated, some, self._selection_rows, d**-0.5, self._memory[b], readers=chosen.heads
        )
        return output

    def _plan(self, token: Step) -> None:
        """Compute the number of pages that each sequence of a step reads."""
        start = token.position.long()
        sequences = self._requests.sequences(token.rows, start, start + 1)
        count = self.policy.pages(sequences).masked_fill(start < sequences.prompt, _ALL)
        many = self._page_rule.page // self.pool.page_slots
        self._wanted = PageBudget(count, many, self._page_rule.last)
        batch_index = torch.arange(len(token.rows), device=token.rows.device)
        self._selection_rows = torch.where(token.rows < 0, -1, batch_index)

    def step(self, layer: int, step: AttentionStep) -> Attended:
        """Store tokens and attend, as `PagedKVCache.step`; a prompt waits once, in layer 0."""
        self._micro_batch = step.micro_batch
        if layer == 0 and step.position.shape[1] > 1:
            self._changed[step.micro_batch] = self._changed_pages(step)
        return super().step(layer, step)

    def _prefill(self, layer: int, tokens: Chunk) -> Attended:
        attended = super()._prefill(layer, tokens)
        self._bound(layer, tokens.rows)
        return attended

    def _changed_pages(self, step: AttentionStep) -> range:
        """Return the pages in which a micro-batch changes any KV list; waits for the device.

        All layers and heads hold every token of a sequence, so that the answer holds for them all.
        """
        before = self.lists.lengths[0, step.rows, 0]
        after = before + (step.position >= 0).sum(1)
        least, most = torch.stack([before.amin(), after.amax()]).tolist()
        return range(max(0, least - 1) // self.pool.page_slots, self._pages_of(most))

    def _bound(self, layer: int, rows: Tensor) -> None:
        """Compute the bounds of the changed pages of rows [b]."""
        size, lengths = self.pool.page_slots, self.lists.lengths[layer, rows]
        changed = self._changed[self._micro_batch]
        page_index = torch.arange(changed.start, changed.stop, device=rows.device)
        table = self.lists.tables[layer, rows][..., page_index].long()
        slot = page_index[:, None] * size + torch.arange(size, device=rows.device)
        held = (slot < lengths[..., None, None])[..., None]  # [b, h, p, s, 1]
        keys = self.pool.pages[table, 0]
        lowest = keys.masked_fill(~held, torch.inf).amin(3)
        highest = keys.masked_fill(~held, -torch.inf).amax(3)
        page = table.masked_fill(~held[..., 0, 0], 0)  # the bounds of page 0 are never read
        self._bounds[page] = torch.stack([lowest, highest], 3)
