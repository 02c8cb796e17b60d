"""Requests and the sequences that continue their prompts: tokens, texts and counts, no tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dms_train.inference.accounting import Meter
from dms_train.inference.given_tokens import GivenTokens
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import (
    CompletionOutput,
    GivenScores,
    RequestOutput,
    TokenLogprobs,
)
from dms_train.inference.policies.base import RequestSizes
from dms_train.inference.sampler import SampledToken, SamplingRow, signed_seed
from dms_train.inference.scheduler import SequenceState
from dms_train.inference.texts import GeneratedText
from dms_train.inference.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(SequenceState):
    """One continuation of a request, or a conversation.

    Attributes:
        request_id: The request's.
        seed: Of its random numbers.
        params: How to continue.
        meter: What it has cost since the prompt started.
        prompt: Tokens of the current prompt.
        logprobs: Of the generated tokens, if asked for.
        given: Tokens whose log-probabilities are wanted though they are not sampled.
        text: Of the generated tokens.
        stops: Tokens that end it.
        started: When its prompt came, on the clock `time.monotonic`.
        advanced: When its newest generated token was known, on the same clock.
    """

    request_id: str
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    meter: Meter = field(default_factory=Meter)
    prompt: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    given: GivenTokens | None = None
    text: GeneratedText = field(default_factory=lambda: GeneratedText(None, [], ()))
    stops: frozenset[int] = frozenset()
    started: float = 0.0
    advanced: float = 0.0

    @property
    def prompt_start(self) -> int:
        """Where the current prompt starts in `tokens`."""
        return self.prompt_end - len(self.prompt)

    @property
    def sizes(self) -> RequestSizes:
        """What a policy may know of it."""
        limit = self.prompt_end if self.limit is None else self.limit
        return RequestSizes(self.prompt_end, limit, signed_seed(self.seed))

    @property
    def output(self) -> list[int]:
        """Tokens generated for the current prompt, or given to follow it."""
        return self.tokens[self.prompt_end :]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of the tokens of the prompt so far, None for the first one; None unless asked for."""
        if self.given is None or self.params.prompt_logprobs is None:
            return None
        return [None, *self.given.entries]

    @property
    def scores(self) -> GivenScores | None:
        """Of the tokens that follow the prompt; None if they are sampled."""
        if self.given is None or self.given.top is not None:
            return None
        return self.given.scores

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not in the cache yet."""
        return self.computed < self.prompt_end

    @property
    def shareable(self) -> list[int]:
        """Its tokens up to the first one that must be computed, whatever snapshots hold."""
        end = len(self.tokens) - self.given_only
        if self.given is not None:
            end = min(end, self.given.logits_from + 1)
        return self.tokens[:end]

    def take(self, count: int) -> list[int]:
        """The next tokens to compute; the one that is on the device only is left out."""
        return self.tokens[self.computed : self.computed + count]

    def add_prompt(
        self,
        tokens: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: frozenset[int],
        longest: int,
    ) -> None:
        """Append a prompt to all tokens so far; costs are counted from here on.

        Args:
            tokens: The prompt.
            params: How to continue it.
            tokenizer: Of the model; None gives no text.
            stops: The model's end-of-text tokens.
            longest: Most tokens of a sequence.
        """
        self.params, self.prompt = params, tokens
        self.tokens += tokens
        self.prompt_end = len(self.tokens)
        self.limit = min(self.prompt_end + params.max_tokens, longest)
        self.finish_reason = None
        self.logprobs, self.given = [], None
        self.given_only = params.max_tokens == 0
        if params.prompt_logprobs is not None and self.index == 0:
            self.given = GivenTokens(
                start=self.prompt_start + 1, end=self.prompt_end, top=params.prompt_logprobs
            )
        self.text = GeneratedText(tokenizer, self.tokens, params.stop)
        stops = frozenset() if params.ignore_eos else stops
        self.stops = stops | frozenset(params.stop_token_ids)
        self.meter.restart(traced=params.kv_trace)
        self.started = self.advanced = time.monotonic()
        if params.seed is not None:
            self.seed = params.seed

    def give(self, continuation: list[int]) -> None:
        """Follow the prompt with tokens that are scored; nothing is sampled.

        Args:
            continuation: At least one token.
        """
        self.tokens += continuation
        self.given_only = True
        self.given = GivenTokens(start=self.prompt_end, end=len(self.tokens))

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs for the next token."""
        before, output = self.tokens[: self.prompt_end], self.output
        return SamplingRow(self.params, self.seed, self.index, before, output)

    def append(self, sampled: SampledToken) -> None:
        """Add a sampled token, and end the sequence if it is the last one."""
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs._replace(text_offset=self.text.decoded))
        self.extend([sampled.token])

    def extend(self, tokens: list[int]) -> int:
        """Add sampled tokens up to the last one of the sequence; how many these are.

        Args:
            tokens: At least one, and no more than its limit allows.
        """
        if not self.stops.isdisjoint(tokens):
            last = next(i for i, token in enumerate(tokens) if token in self.stops)
            tokens = tokens[: last + 1]
        taken = self.text.add(tokens)
        self.tokens += tokens[:taken]
        self.advanced = time.monotonic()
        if tokens[taken - 1] in self.stops or self.text.stopped:
            self.finish_reason = "stop"
        elif self.limit is not None and len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return taken

    def to_output(self) -> CompletionOutput:
        """What is returned of it now."""
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=self.output,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            kv=self.meter.report(),
            seconds=self.advanced - self.started,
            scores=self.scores,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt with its continuations.

    Attributes:
        request_id: Name in outputs.
        sequences: One for each continuation.
        prompt: Text of the prompt, or None.
        final_only: Whether it is returned only when it has finished.
        keep_cache: Whether its cache stays when it has finished.
    """

    request_id: str
    sequences: list[Sequence]
    prompt: str | None = None
    final_only: bool = False
    keep_cache: bool = False

    @property
    def grouped(self) -> bool:
        """Whether several tokens may be decoded at once: what lies behind its end is not seen."""
        return self.final_only and not self.keep_cache

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended."""
        return all(s.finish_reason is not None for s in self.sequences)

    def to_output(self) -> RequestOutput:
        """What is returned of it now."""
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt,
            outputs=[sequence.to_output() for sequence in self.sequences],
            finished=self.finished,
            prompt_logprobs=first.prompt_logprobs,
        )
