"""One HTTP request as requests of the engine: streamed parts, end and cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

from dms_train.inference.errors import InferenceError
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from dms_train.inference.tokenizer import Tokenizer
from dms_train.server.errors import ApiError
from dms_train.server.token_pieces import TokenPieces
from dms_train.server.worker import EngineThread, Positions, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Checked request of a client.

    Attributes:
        prompts: Token ids, one list or several.
        params: Sampling parameters of each prompt.
        priority: See `InferenceEngine.add_request`.
        seconds: Time limit of the request.
        stream: True to send the answer while it is generated.
        include_usage: True to end a stream with the usage.
        kv_positions: True to include the live tokens in the parts of a stream.
        echo: Text of each prompt, which precedes its continuations; None sends no prompt.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    seconds: float
    stream: bool
    include_usage: bool
    kv_positions: bool
    echo: list[str] | None = None

    @property
    def sequences(self) -> int:
        """Number of continuations of all prompts."""
        return len(self.prompts) * self.params.n


class TokenEntry(NamedTuple):
    """Token with its log-probabilities; these are None for the first token of a prompt."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """State of the cache after one part of a stream.

    Attributes:
        pieces: Texts of the new tokens of this part; the first part includes the prompt.
        positions: Live positions by layer and head; None where the cache does not keep them.
        tokens: Tokens seen.
        cr_factor: Tokens seen over tokens held, without layers that have a sliding window.
        live_bytes: Bytes of the tokens held.
    """

    pieces: list[str]
    positions: Positions | None
    tokens: int
    cr_factor: float
    live_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """New part of one continuation.

    Attributes:
        index: Number of the continuation.
        text: New text.
        entries: Log-probabilities of the new tokens, if requested.
        finish_reason: Reason for the end; None while the continuation runs.
        kv: State of the cache, if requested.
    """

    index: int
    text: str
    entries: list[TokenEntry] | None
    finish_reason: str | None
    kv: KVView | None = None


@dataclass(slots=True, kw_only=True)
class _Choice:
    """Record of the output of a continuation that was already sent."""

    index: int
    characters: int = 0
    tokens: int = 0
    finish_reason: str | None = None

    def advance(self, output: CompletionOutput) -> Part | None:
        """Return the new part; None if nothing is new."""
        ended = self.finish_reason is not None
        if ended or (len(output.token_ids) == self.tokens and output.finish_reason is None):
            return None
        text, entries = output.text[self.characters :], None
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            entries = [TokenEntry(*pair) for pair in islice(pairs, self.tokens, None)]
        self.characters, self.tokens = len(output.text), len(output.token_ids)
        self.finish_reason = output.finish_reason
        return Part(index=self.index, text=text, entries=entries, finish_reason=self.finish_reason)


class PromptEcho:
    """Prompt that is sent before its continuations.

    Args:
        text: Text of the prompt.
        tokenizer: Tokenizer of the model; None if it has none.
    """

    def __init__(self, text: str, tokenizer: Tokenizer | None) -> None:
        self._text, self._tokenizer = text, tokenizer

    def part(self, index: int, output: RequestOutput) -> Part:
        """Return the prompt as the first part of a continuation.

        Args:
            index: Number of the continuation.
            output: Output with a computed prompt, and its log-probabilities if requested.
        """
        entries = None
        if output.prompt_logprobs is not None:
            entries = [
                TokenEntry(token, entry and entry._replace(text_offset=offset))
                for token, entry, offset in zip(
                    output.prompt_token_ids,
                    output.prompt_logprobs,
                    self._offsets(output.prompt_token_ids),
                    strict=False,  # a prompt that ran out of time has fewer
                )
            ]
        return Part(index=index, text=self._text, entries=entries, finish_reason=None)

    def shifted(self, part: Part) -> Part:
        """Return a part of the continuation with offsets from the start of the prompt."""
        if part.entries is None:
            return part
        ahead = len(self._text)
        entries = [
            TokenEntry(token, entry and entry._replace(text_offset=entry.text_offset + ahead))
            for token, entry in part.entries
        ]
        return replace(part, entries=entries)

    def _offsets(self, tokens: list[int]) -> list[int]:
        """Return the offset of each token; special tokens before the text have offset 0."""
        pieces = TokenPieces(self._tokenizer)
        ends = list(accumulate(len(pieces.add(token)) for token in tokens))
        added = max(0, ends[-1] - len(self._text))
        return [max(0, start - added) for start in [0, *ends[:-1]]]


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """Prompt of a request and its continuations."""

    ticket: Ticket
    choices: list[_Choice]
    pieces: TokenPieces
    echo: PromptEcho | None
    shown: int = 0  # number of tokens sent in a KVView so far

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


@dataclass(slots=True, kw_only=True)
class Timing:
    """Times of events, in seconds of a monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None


class Generation:
    """Engine requests of a job; a context manager that aborts unfinished ones.

    Args:
        engine: Thread that runs the requests.
        tokenizer: Tokenizer of the model; None if it has none.
        job: Job to run.
        on_done: Called when the engine has finished all requests of the job.
    """

    def __init__(
        self,
        engine: EngineThread,
        tokenizer: Tokenizer | None,
        job: Job,
        on_done: Callable[[], None],
    ) -> None:
        self._engine, self.job, self._on_done = engine, job, on_done
        self._changed = asyncio.Event()
        self.timing = Timing()
        n = job.params.n
        self._prompts = [
            _Prompt(
                ticket=Ticket(
                    changed=self._changed,
                    wants_positions=job.kv_positions,
                    on_done=self._note_done,
                ),
                choices=[_Choice(index=at * n + i) for i in range(n)],
                pieces=TokenPieces(tokenizer),
                echo=None if job.echo is None else PromptEcho(job.echo[at], tokenizer),
            )
            for at in range(len(job.prompts))
        ]

    async def __aenter__(self) -> Generation:
        """Add the prompts to the engine.

        Raises:
            ApiError: 400 if the engine refuses a prompt.
        """
        job = self.job
        try:
            for prompt, tokens in zip(self._prompts, job.prompts, strict=True):
                await self._engine.add(prompt.ticket, tokens, job.params, job.priority, job.seconds)
        except BaseException as error:
            self._abort()
            if isinstance(error, InferenceError):
                raise ApiError(400, str(error)) from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort unfinished requests."""
        self._abort()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield new parts until every continuation has finished.

        Raises:
            ApiError: 500 if a step failed, 503 if the server stopped.
        """
        waiting = self._prompts
        while waiting:
            await self._changed.wait()
            self._changed.clear()
            for prompt in waiting:
                for part in self._news(prompt):
                    yield part
            waiting = [prompt for prompt in waiting if not prompt.done]

    def usage(self) -> dict[str, Any]:
        """Return token counts and cache statistics, summed over prompts and continuations."""
        outputs = [p.ticket.output for p in self._prompts if p.ticket.output is not None]
        prompt = sum(map(len, self.job.prompts))
        completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": _cached_tokens(outputs)},
            "kv": _kv_usage(outputs),
        }

    def _note_done(self) -> None:
        if all(prompt.ticket.done for prompt in self._prompts):
            self._on_done()

    def _news(self, prompt: _Prompt) -> list[Part]:
        ticket = prompt.ticket
        if ticket.failure is not None:
            raise ticket.failure
        output = ticket.output
        if output is None:
            return []
        if self.timing.first_token is None:
            self.timing.first_token = time.monotonic()
        parts: list[Part] = []
        for choice, completion in zip(prompt.choices, output.outputs, strict=True):
            begins = choice.tokens == 0
            part = choice.advance(completion)
            if part is not None and prompt.echo is not None:
                if begins:
                    parts.append(prompt.echo.part(choice.index, output))
                part = prompt.echo.shifted(part)
            if part is not None:
                parts.append(part)
        if self.job.kv_positions:
            parts = [_with_view(part, prompt, output) for part in parts]
        return parts

    def _abort(self) -> None:
        for prompt in self._prompts:
            if not prompt.ticket.done:
                self._engine.abort(prompt.ticket)


def _with_view(part: Part, prompt: _Prompt, output: RequestOutput) -> Part:
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    pieces = [prompt.pieces.add(token) for token in tokens[prompt.shown :]]
    if pieces and part.finish_reason is not None:
        pieces[-1] += prompt.pieces.finish()
    view = KVView(
        pieces=pieces,
        positions=prompt.ticket.positions,
        tokens=output.kv.tokens,
        cr_factor=output.kv.cr_factor,
        live_bytes=output.kv.live_bytes,
    )
    prompt.shown = len(tokens)
    return Part(
        index=part.index,
        text=part.text,
        entries=part.entries,
        finish_reason=part.finish_reason,
        kv=view,
    )


def _cached_tokens(outputs: list[RequestOutput]) -> int:
    """Return the number of prompt tokens from snapshots, counted once per prompt."""
    return sum(output.outputs[0].kv.cached_tokens for output in outputs)


def _kv_usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    costs = [each.kv for output in outputs for each in output.outputs]
    held = sum(kv.compressed_tokens for kv in costs)
    return {
        "kv_reads": sum(kv.kv_reads for kv in costs),
        "peak_live_tokens": sum(kv.peak_live_tokens for kv in costs),
        "peak_live_bytes": sum(kv.peak_live_bytes for kv in costs),
        "cr_factor": sum(kv.tokens for kv in costs) / held if held else 1.0,
    }
