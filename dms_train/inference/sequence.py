"""The state of one request: integers, no tensors except its random generator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dms_train.inference.accounting import Meter
from dms_train.inference.options import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens of a request or conversation and how far the cache has got.

    Attributes:
        request_id: Name in outputs.
        prompt: Text of the prompt, or None.
        tokens: Everything so far: prompts and what was generated.
        prompt_start: Where the current prompt starts in `tokens`.
        prompt_end: Where it ends.
        params: How to continue.
        generator: Source of its random numbers.
        meter: What it has cost since the prompt started.
        row: Cache row, or None while it waits.
        computed: Tokens that are in the cache or were evicted from it.
        finish_reason: `stop`, `length`, or None while it runs.
    """

    request_id: str
    prompt: str | None
    tokens: list[int]
    prompt_start: int
    prompt_end: int
    params: SamplingParams
    generator: torch.Generator
    meter: Meter
    row: int | None = None
    computed: int = 0
    finish_reason: str | None = field(default=None)

    @property
    def output(self) -> list[int]:
        """Tokens generated for the current prompt."""
        return self.tokens[self.prompt_end :]

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not in the cache yet."""
        return self.computed < self.prompt_end

    def take(self, limit: int) -> list[int]:
        """The next tokens to compute, at most `limit`."""
        return self.tokens[self.computed : self.computed + limit]

    def append(self, token: int, stops: frozenset[int], longest: int) -> None:
        """Add a sampled token and say whether it was the last; `longest` is the model's limit."""
        self.tokens.append(token)
        if token in stops:
            self.finish_reason = "stop"
        elif len(self.output) >= self.params.max_tokens or len(self.tokens) >= longest:
            self.finish_reason = "length"
