"""StreamingLLM: the first tokens and the newest ones (Xiao et al., 2023, arXiv:2309.17453).

Keys keep the positions at which they were computed. A query of a prompt reads what the budget
leaves at its position, as one of a generated token does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, PolicyKind, RequestSizes, Slots
from dms_train.inference.policies.budget import GROWING, BudgetOptions
from dms_train.limits import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLMOptions(BudgetOptions):
    """Options of `streaming_llm`.

    Attributes:
        sinks: First tokens that stay; they count against the budget, which the newest token has
            at least one place of.
    """

    sinks: Annotated[int, AtLeast(0)] = 4


class StreamingLLMPolicy(CachePolicy):
    """Keeps the first tokens and the last ones, the query's own among them."""

    settles = False

    def __init__(self, options: StreamingLLMOptions) -> None:
        self._options = options
        self.shareable = options.fixed

    def max_tokens(self, request: RequestSizes, computed: int) -> int | None:
        """One token at a time where the budget grows with them, any number elsewhere."""
        if self._options.budget_mode != GROWING:
            return None
        return max(1, request.prompt - computed)

    def expired(self, slots: Slots, at: Tensor) -> Tensor:
        """Whether a token is neither among the first nor among the last ones."""
        assert slots.sequences is not None
        budget = self._options.tokens(slots.sequences)[:, None, None, None]
        last = (budget - self._options.sinks).clamp(min=1)
        position = slots.position[:, :, None, :]
        return (at[:, None, :, None] - position >= last) & (position >= budget - last)


POLICY = PolicyKind(StreamingLLMOptions, lambda options, spec: StreamingLLMPolicy(options))
