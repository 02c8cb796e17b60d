"""The state of one request: integers, no tensors except its random generator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dms_train.inference.accounting import Meter
from dms_train.inference.options import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens of a request or conversation and how many of them the cache has taken.

    Attributes:
        request_id: Name in outputs.
        params: How to continue.
        generator: Source of its random numbers.
        meter: What it has cost since the prompt started.
        final_only: Whether it is returned only when it has finished.
        keep_cache: Whether its cache stays when it has finished.
        prompt: Text of the prompt, or None.
        tokens: All prompts and generated tokens so far.
        prompt_start: Where the current prompt starts in `tokens`.
        prompt_end: Where it ends.
        row: Cache row, or None while it waits.
        computed: Tokens that are in the cache or were evicted from it.
        finish_reason: `stop`, `length`, or None while it runs.
    """

    request_id: str
    params: SamplingParams
    generator: torch.Generator
    meter: Meter
    final_only: bool = False
    keep_cache: bool = False
    prompt: str | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_start: int = 0
    prompt_end: int = 0
    row: int | None = None
    computed: int = 0
    finish_reason: str | None = None

    @property
    def output(self) -> list[int]:
        """Tokens generated for the current prompt."""
        return self.tokens[self.prompt_end :]

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not in the cache yet."""
        return self.computed < self.prompt_end

    @property
    def runnable(self) -> bool:
        """Whether it has tokens to compute."""
        return self.finish_reason is None and self.computed < len(self.tokens)

    def take(self, limit: int) -> list[int]:
        """The next tokens to compute, at most `limit`."""
        return self.tokens[self.computed : self.computed + limit]

    def add_prompt(self, text: str | None, tokens: list[int], params: SamplingParams) -> None:
        """Append a prompt to all tokens so far; costs are counted from here on."""
        self.prompt, self.params = text, params
        self.prompt_start = len(self.tokens)
        self.tokens += tokens
        self.prompt_end = len(self.tokens)
        self.finish_reason = None
        self.meter.restart()
        if params.seed is not None:
            self.generator.manual_seed(params.seed)

    def append(self, token: int, stops: frozenset[int], longest: int) -> None:
        """Add a sampled token and say whether it was the last; `longest` is the model's limit."""
        self.tokens.append(token)
        if token in stops:
            self.finish_reason = "stop"
        elif len(self.output) >= self.params.max_tokens or len(self.tokens) >= longest:
            self.finish_reason = "length"
