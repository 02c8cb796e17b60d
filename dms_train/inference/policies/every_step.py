"""Base of policies that evict after every token, by attention received.

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
        prefill: `stream` computes the tokens of the budget with full attention. It then computes
            the rest of the prompt one token at a time, within the budget (DMS paper, appendix F.1).
            `dense` computes the whole prompt with full attention and evicts at its end.
    """

    prefill: Annotated[str, OneOf(STREAM, DENSE)] = STREAM


class EveryStepPolicy(CachePolicy):
    """Keep to a budget after every pass, or from the end of the prompt on.

    Attributes:
        streams: Whether the budget holds inside prompts too, `prefill=stream`.
    """

    scored = True
    shareable_prompts = True
    evicts_prompt_only = False

    def __init__(self, options: EveryStepOptions) -> None:
        self._options = options
        self.streams = options.prefill == STREAM
        self.shareable = options.fixed and self.streams
        self.shareable_prompts = type(self).shareable_prompts and not self.streams

    def max_tokens(self, request: RequestSizes, computed: int) -> int:
        """Return the number of tokens of a pass: with `stream`, first the budget, then 1."""
        if self._options.prefill == DENSE:
            return max(1, request.prompt - computed)
        return max(1, self._options.first_tokens(request) - computed)

    def budget(self, sequences: Sequences) -> Tensor:
        """Return the number of tokens that stay now, int64 [b]; all inside a dense prompt."""
        budget = self._options.tokens(sequences)
        if self._options.prefill == DENSE:
            return torch.where(sequences.end < sequences.prompt, sequences.end, budget)
        return budget
