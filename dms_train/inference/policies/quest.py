"""Quest: every token stays, and a step reads selected pages (Tang et al., 2024).

arXiv:2406.10774; code at 01c1623. A page is a run of consecutive tokens. The smallest and the
largest value of each channel of its keys bound the score that a query can give to its tokens. Each
query head reads the pages with the highest bounds. Prompts are computed with full attention (DMS
paper, appendix F.1).

The first layers, the fewest pages and the page of the newest token are options, because paper and
code differ (A-QUEST1). Reads are the tokens in the union of the pages of a KV head's query heads
(A-QUEST2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.policies.base import (
    CachePolicy,
    NewTokens,
    PolicyKind,
    RequestSizes,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.kernel_rules import KernelRule, PageRule
from dms_train.limits import AtLeast

_LOWEST, _HIGHEST = "lowest keys of pages", "highest keys of pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestOptions(BudgetOptions):
    """Options of `quest`.

    Attributes:
        page: Tokens of a page; None takes the larger of 16 and twice `cr`.
        dense_layers: Number of first layers that read everything.
        min_pages: Smallest number of pages of a query head.
        include_last_page: Always read the page of the newest token; it counts against the budget.
    """

    page: Annotated[int | None, AtLeast(1)] = None
    dense_layers: Annotated[int, AtLeast(0)] = 0
    min_pages: Annotated[int, AtLeast(1)] = 1
    include_last_page: bool = True


class QuestPolicy(CachePolicy):
    """Quest; a KV list keeps the lowest and highest keys of its pages, [b, h, pages, d] each.

    Attributes:
        page: Number of tokens of a page.
    """

    shareable = False  # a prompt reads all tokens, generated text does not
    shareable_prompts = True

    def __init__(self, options: QuestOptions) -> None:
        self._options = options
        self.page = options.page or max(16, round(2 * (options.cr or 0)))
        self.state_tokens = self.page

    def kernel_rule(self) -> KernelRule | str:
        """Read the pages with the highest bounds."""
        o = self._options
        return PageRule(page=self.page, dense_layers=o.dense_layers, last=o.include_last_page)

    def max_tokens(self, request: RequestSizes, computed: int) -> int:
        """Return chunks of a prompt, then one token at a time, also in recomputation."""
        return max(1, request.prompt - computed)

    def pages(self, sequences: Sequences) -> Tensor:
        """Return the number of pages that a query head reads now, int64 [b]."""
        count = self._options.tokens(sequences) // self.page
        return count.clamp(min=self._options.min_pages)

    def on_store(self, slots: Slots, arrival: NewTokens) -> Tensor:
        """Bring the bounds of the pages up to date."""
        sequences = slots.sequences
        assert sequences is not None
        pages = -(-int(sequences.end.max()) // self.page)
        if pages > 0 and slots.layer >= self._options.dense_layers:
            first = torch.arange(pages, device=arrival.key.device) * self.page
            fresh = (first >= sequences.start[:, None])[:, None, :, None]
            for name, reduce, limit in (
                (_LOWEST, "amin", torch.inf),
                (_HIGHEST, "amax", -torch.inf),
            ):
                before = self._bounds(sequences, name, arrival.key, pages)
                sequences.lists[name] = self._extended(
                    before.masked_fill(fresh, limit), arrival, reduce, limit
                )
        return slots.state

    def _bounds(self, sequences: Sequences, name: str, key: Tensor, pages: int) -> Tensor:
        """Return the bounds so far, [b, h, pages, d]."""
        known = sequences.lists.get(name)
        if known is None:
            known = key.new_zeros(*key.shape[:2], 0, key.shape[3])
        return F.pad(known, (0, 0, 0, max(0, pages - known.shape[2])))[:, :, :pages]

    def _extended(self, bounds: Tensor, arrival: NewTokens, reduce: str, limit: float) -> Tensor:
        """Return the bounds extended to the arriving keys; 0 for pages without tokens."""
        real = (arrival.position >= 0)[:, None, :, None]
        key = arrival.key.masked_fill(~real, limit)
        page = (arrival.position.clamp(min=0) // self.page)[:, None, :, None].expand_as(key)
        extended = bounds.scatter_reduce(2, page, key, reduce)
        return extended.masked_fill(extended.isinf(), 0)

    def select(self, slots: Slots, query: Tensor) -> Tensor | None:
        """Return the slots in the best pages of each query head."""
        sequences = slots.sequences
        assert sequences is not None
        if slots.layer < self._options.dense_layers:
            return None
        wide = torch.promote_types(query.dtype, torch.float32)
        bounds = (sequences.lists[name][:, :, None] for name in (_LOWEST, _HIGHEST))
        lowest, highest = (bound.to(wide) for bound in bounds)
        q = query[:, :, :, None].to(wide)
        bound = torch.maximum(q * lowest, q * highest).sum(-1)  # [b, h, r, pages]
        page = torch.arange(bound.shape[-1], device=bound.device)
        last = ((sequences.end - 1) // self.page)[:, None, None, None]
        bound = bound.masked_fill(page > last, -torch.inf)
        if self._options.include_last_page:
            bound = bound.masked_fill(page == last, torch.inf)
        count = self.pages(sequences)
        order = bound.argsort(dim=-1, descending=True, stable=True)
        best = torch.zeros_like(bound, dtype=torch.bool).scatter_(
            -1, order, page.expand_as(order) < count[:, None, None, None]
        )
        slot_page = (slots.position.clamp(min=0) // self.page)[:, :, None]
        prompt = (sequences.start < sequences.prompt)[:, None, None, None]
        return best.gather(-1, slot_page.expand(-1, -1, query.shape[2], -1)) | prompt


POLICY = PolicyKind(QuestOptions, lambda options, spec: QuestPolicy(options))
