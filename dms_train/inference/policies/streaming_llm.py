"""StreamingLLM: the first tokens and the newest ones (Xiao et al., 2023, arXiv:2309.17453).

A query reads the tokens that the budget leaves at its position, in a prompt and in generated text.
With `positions=original`, keys keep the positions at which they were computed. With
`positions=cache`, they have their positions in the cache, as in the paper. The newest tokens then
follow the first ones directly, so that distances never exceed the budget. Stored keys do not
change; for the first tokens, the query is moved back, which gives the same products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import (
    CachePolicy,
    PolicyKind,
    PositionShift,
    RequestSizes,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import GROWING, BudgetOptions
from dms_train.inference.policies.kernel_rules import OLDEST, BudgetRule, KernelRule, Limits
from dms_train.limits import AtLeast, OneOf
from dms_train.method.base import MethodSpec

ORIGINAL, CACHE = "original", "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLMOptions(BudgetOptions):
    """Options of `streaming_llm`.

    Attributes:
        sinks: Number of first tokens that stay. They count against the budget, but at least one
            token of the budget is for the newest token.
        positions: `original` takes positions in the text, `cache` positions among the kept tokens.
    """

    sinks: Annotated[int, AtLeast(0)] = 4
    positions: Annotated[str, OneOf(ORIGINAL, CACHE)] = ORIGINAL


class StreamingLLMPolicy(CachePolicy):
    """Keep the first and the last tokens; the last ones include the query's own token."""

    evicts_prompt_only = False

    def __init__(self, options: StreamingLLMOptions) -> None:
        self._options = options
        self._moves = options.positions == CACHE
        self.shareable = options.fixed

    def max_tokens(self, request: RequestSizes, computed: int) -> int | None:
        """Return 1 if the budget grows with the tokens, otherwise None."""
        if self._options.budget_mode != GROWING:
            return None
        return max(1, request.prompt - computed)

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return whether a token is neither among the first nor among the last ones."""
        assert slots.sequences is not None
        first, last = (x[:, None, None, None] for x in self.limits(slots.sequences))
        position = slots.position[:, :, None, :]
        return (at[:, None, :, None] - position >= last) & (position >= first)

    def position_shift(self, slots: Slots, at: Tensor) -> PositionShift | None:
        """Return the first tokens, moved by the number of evicted tokens after them."""
        if not self._moves:
            return None
        position = slots.position[:, 0, None]  # equal for all KV heads
        read = (position >= 0) & (position <= at[:, :, None]) & ~self.evict_mask(slots, at)[:, 0]
        assert slots.sequences is not None
        first = self.limits(slots.sequences).most[:, None, None]
        sinks = (slots.position >= 0) & (slots.position < first)
        return PositionShift(sinks, (at + 1 - read.sum(-1)).clamp(min=0))

    def kernel_rule(self) -> KernelRule | str:
        """Return the rule that evicts the oldest token after the first ones."""
        if self._moves:
            return "reads keys at other positions (positions=cache)"
        return BudgetRule(evicts=OLDEST, streams=True)

    def limits(self, sequences: Sequences) -> Limits:
        """Return the number of first and of last tokens that stay."""
        budget = self._options.tokens(sequences)
        last = (budget - self._options.sinks).clamp(min=1)
        return Limits(budget - last, last)


def _build(options: StreamingLLMOptions, spec: MethodSpec | None) -> StreamingLLMPolicy:
    if options.positions == CACHE and spec is not None and spec.clear_after_rope:
        raise InferenceError(
            "policy=streaming_llm positions=cache: the model clears a channel of its queries after "
            "RoPE, which fixes their positions; use positions=original"
        )
    return StreamingLLMPolicy(options)


POLICY = PolicyKind(StreamingLLMOptions, _build)
