"""Base of policies that evict after every token, by the attention that tokens receive.

Shape letters: b sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, RequestSizes, Sequences
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.limits import OneOf

STREAM, DENSE = "stream", "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryStepOptions(BudgetOptions):
    """Options of a policy that evicts by attention received.

    Attributes:
        prefill: `stream` computes the tokens of the budget with full attention and the rest of a
            prompt one token at a time, within the budget (DMS paper, appendix F.1); `dense`
            computes the whole prompt with full attention and evicts at its end.
    """

    prefill: Annotated[str, OneOf(STREAM, DENSE)] = STREAM


class EveryStepPolicy(CachePolicy):
    """Keep to a budget after every pass, or after those from the end of the prompt on.

    Attributes:
        streams: Whether it is after every pass, `prefill=stream`.
    """

    scored = True
    evicts_prompt_only = False

    def __init__(self, options: EveryStepOptions) -> None:
        self._options = options
        self.streams = options.prefill == STREAM
        self.shareable = options.fixed and self.streams

    def max_tokens(self, request: RequestSizes, computed: int) -> int:
        """Return, with `stream`, the tokens of the budget at first and then one."""
        if self._options.prefill == DENSE:
            return max(1, request.prompt - computed)
        return max(1, self._options.first_tokens(request) - computed)

    def budget(self, sequences: Sequences) -> Tensor:
        """Return the tokens that stay now, int64 [b]; all of them inside a dense prompt."""
        budget = self._options.tokens(sequences)
        if self._options.prefill == DENSE:
            return torch.where(sequences.end < sequences.prompt, sequences.end, budget)
        return budget
