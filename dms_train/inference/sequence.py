"""Requests and their sequences: tokens, texts and counts, no tensors."""

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
from dms_train.inference.sequence_state import FINISHED, RUNNING, WAITING, SequenceState
from dms_train.inference.texts import GeneratedText
from dms_train.inference.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(SequenceState):
    """One continuation of a request, or a conversation.

    Attributes:
        request_id: Id of the request.
        seed: Seed of the random numbers.
        params: Sampling parameters.
        meter: Cost since the current prompt started.
        prompt: Tokens of the current prompt.
        logprobs: Log-probabilities of the generated tokens, if requested.
        given: Given tokens to score; None if no scores were requested.
        read_only: True if the hidden states of all tokens are wanted, and no token is sampled.
        text: Text of the generated tokens.
        stops: Tokens that end the sequence.
        started: Time at which the prompt arrived, on the clock `time.monotonic`.
        advanced: Time at which the host received the newest generated token, on the same clock.
    """

    request_id: str
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    meter: Meter = field(default_factory=Meter)
    prompt: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    given: GivenTokens | None = None
    read_only: bool = False
    text: GeneratedText = field(default_factory=lambda: GeneratedText(None, [], ()))
    stops: frozenset[int] = frozenset()
    started: float = 0.0
    advanced: float = 0.0

    @property
    def prompt_start(self) -> int:
        """Index in `tokens` at which the current prompt starts."""
        return self.prompt_end - len(self.prompt)

    @property
    def sizes(self) -> RequestSizes:
        """Facts about the request that the cache policy may use."""
        limit = self.prompt_end if self.max_total_tokens is None else self.max_total_tokens
        return RequestSizes(self.prompt_end, limit, signed_seed(self.seed))

    @property
    def output(self) -> list[int]:
        """Tokens after the current prompt, generated or given."""
        return self.tokens[self.prompt_end :]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt tokens computed so far; None unless requested.

        The first token has none.
        """
        if self.given is None or self.params.prompt_logprobs is None:
            return None
        return [None, *self.given.entries]

    @property
    def scores(self) -> GivenScores | None:
        """Scores of the given tokens after the prompt; None if tokens are sampled."""
        if self.given is None or self.given.top is not None:
            return None
        return self.given.scores

    @property
    def prefilling(self) -> bool:
        """True if part of the prompt is still to be computed."""
        return self.num_computed_tokens < self.prompt_end

    @property
    def shareable(self) -> list[int]:
        """First tokens that a snapshot may provide, followed by one token to compute.

        Tokens with requested logits or hidden states are computed, because snapshots hold neither.
        """
        end = 1 if self.read_only else len(self.tokens) - self.score_only
        if self.given is not None:
            end = min(end, self.given.logits_from + 1)
        return self.tokens[:end]

    def next_known(self, count: int) -> list[int]:
        """Return the known tokens among the next `count` tokens to compute."""
        return self.tokens[self.num_computed_tokens : self.num_computed_tokens + count]

    def add_prompt(
        self,
        tokens: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: frozenset[int],
        longest: int,
    ) -> None:
        """Append a prompt to all tokens so far, and start to count costs anew.

        Args:
            tokens: The prompt.
            params: Sampling parameters.
            tokenizer: Tokenizer of the model; without one, the text stays empty.
            stops: End-of-text tokens of the model.
            longest: Most tokens of a sequence.
        """
        self.params, self.prompt = params, tokens
        self.tokens += tokens
        self.prompt_end = len(self.tokens)
        self.max_total_tokens = min(self.prompt_end + params.max_tokens, longest)
        self.finish_reason = None
        self.status = WAITING if self.batch_slot is None else RUNNING
        self.logprobs, self.given = [], None
        self.score_only = params.max_tokens == 0
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

    def append_given(self, continuation: list[int]) -> None:
        """Append tokens to score after the prompt; no token is sampled.

        Args:
            continuation: The tokens, at least one.
        """
        self.tokens += continuation
        self.score_only = True
        self.given = GivenTokens(start=self.prompt_end, end=len(self.tokens))

    def sampling_row(self) -> SamplingRow:
        """Return the sampler's input for the next token."""
        before, output = self.tokens[: self.prompt_end], self.output
        return SamplingRow(self.params, self.seed, self.index, before, output)

    def append(self, sampled: SampledToken) -> None:
        """Add a sampled token; finish the sequence if it is the last one."""
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs._replace(text_offset=self.text.decoded))
        self.extend([sampled.token])

    def extend(self, tokens: list[int]) -> int:
        """Add sampled tokens up to the end of the sequence; finish it if one of them ends it.

        Args:
            tokens: At least one token, and no more than up to `max_total_tokens`.

        Returns:
            Number of tokens added.
        """
        if not self.stops.isdisjoint(tokens):
            last = next(i for i, token in enumerate(tokens) if token in self.stops)
            tokens = tokens[: last + 1]
        taken = self.text.add(tokens)
        self.tokens += tokens[:taken]
        self.advanced = time.monotonic()
        if tokens[taken - 1] in self.stops or self.text.stopped:
            self.finish("stop")
        elif self.max_total_tokens is not None and len(self.tokens) >= self.max_total_tokens:
            self.finish("length")
        return taken

    def to_output(self) -> CompletionOutput:
        """Return the output so far."""
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
        request_id: Id of the request in outputs.
        sequences: One sequence for each continuation.
        prompt: Text of the prompt; None for a prompt of token ids.
        final_only: True if the engine returns the request only when it has finished.
        keep_cache: True if the cache is kept when the request has finished.
    """

    request_id: str
    sequences: list[Sequence]
    prompt: str | None = None
    final_only: bool = False
    keep_cache: bool = False

    @property
    def allows_bursts(self) -> bool:
        """True if decode bursts are allowed.

        A burst may compute tokens after the end of a sequence. Neither a streamed output nor a kept
        cache may show them.
        """
        return self.final_only and not self.keep_cache

    @property
    def finished(self) -> bool:
        """True if all continuations have finished."""
        return all(s.status is FINISHED for s in self.sequences)

    def to_output(self) -> RequestOutput:
        """Return the output so far."""
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt,
            outputs=[sequence.to_output() for sequence in self.sequences],
            finished=self.finished,
            prompt_logprobs=first.prompt_logprobs,
        )
