"""Budgets: the number of tokens of a sequence that a policy keeps in each KV list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import RequestSizes, Sequences
from dms_train.limits import AtLeast, Below, OneOf

TOTAL, INPUT, GROWING = "total", "input", "growing"
_ROUNDING = 1e-9  # so that 33 tokens at a ratio of 1.1 are 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """Number of tokens, or compression ratio of the request.

    Attributes:
        budget: Tokens of each KV list.
        cr: Compression ratio instead: tokens of the request over the budget, rounded down, at
            least 1 (A-BUD1).
        budget_mode: Dividend of `cr`: `total`, prompt and most new tokens (DMS paper, appendix
            F.1); `input`, the prompt; `growing`, the prompt and the tokens generated so far (DMC
            paper).
    """

    budget: Annotated[int | None, AtLeast(1), Below(2**31)] = None
    cr: Annotated[float | None, AtLeast(1)] = None
    budget_mode: Annotated[str, OneOf(TOTAL, INPUT, GROWING)] = TOTAL

    def check(self, path: str) -> Iterator[str]:
        """Yield an error line if there is no budget, or if there are two."""
        if (self.budget is None) == (self.cr is None):
            yield "needs a budget: give budget (tokens) or cr (compression ratio), one of them"

    def tokens(self, sequences: Sequences) -> Tensor:
        """Return the budget of each sequence, int64 [b]."""
        return self.whole_tokens(self.exact(sequences))

    @staticmethod
    def whole_tokens(exact: Tensor) -> Tensor:
        """Round down, to at least 1."""
        return (exact + _ROUNDING).long().clamp(min=1)

    def exact(self, sequences: Sequences) -> Tensor:
        """Return the unrounded budget of each sequence, float64 [b]."""
        if self.budget is not None:
            return torch.full_like(sequences.end, self.budget, dtype=torch.float64)
        assert self.cr is not None
        whole = {
            TOTAL: sequences.limit,
            INPUT: sequences.prompt,
            GROWING: torch.maximum(sequences.prompt, sequences.end),
        }[self.budget_mode]
        return whole.double() / self.cr

    def first_tokens(self, request: RequestSizes) -> int:
        """Return the budget of a request until its prompt ends."""
        if self.budget is not None:
            return self.budget
        assert self.cr is not None
        whole = request.limit if self.budget_mode == TOTAL else request.prompt
        return max(1, int(whole / self.cr + _ROUNDING))

    @property
    def fixed(self) -> bool:
        """Return whether the budget is the same for every request at any time."""
        return self.budget is not None
