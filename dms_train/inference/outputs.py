"""Outputs of a request, named as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dms_train.inference.accounting import RequestKV


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token, before temperature, penalties and bias.

    Attributes:
        logprob: Log-probability of the token itself.
        top: Log-probabilities of the most likely tokens, by token id. The first token is the one
            that temperature 0 takes.
        text_offset: Offset of the token's text in the text of the continuation.
    """

    logprob: float
    top: dict[int, float]
    text_offset: int = 0


class GivenScores(NamedTuple):
    """Scores of given tokens, in their order.

    Attributes:
        logprobs: Log-probability of each, before temperature, penalties and bias.
        greedy: For each token, True if temperature 0 takes it.
    """

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: Index among the `n` continuations of the request.
        text: Decoded tokens up to a stop text; empty for a model without a tokenizer. The text of
            an unfinished continuation only grows: text that may still change is left out.
        token_ids: Generated tokens, including the stop token; or the tokens that were passed to
            `InferenceEngine.add_scoring`.
        finish_reason: `stop`, `length`, `timeout` (the deadline passed) or `memory` (the cache
            cannot hold the sequence); None until it has finished.
        logprobs: One entry for each of `token_ids`; None unless requested.
        scores: Scores of the tokens that were passed to `InferenceEngine.add_scoring`; None for
            generated tokens.
        kv: Cache statistics so far.
        seconds: Time from the arrival of the prompt to the newest generated token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    kv: RequestKV = field(compare=False)
    seconds: float = field(compare=False)
    scores: GivenScores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Output of a request.

    Attributes:
        request_id: Number in the order of arrival.
        prompt: Text of the prompt; None for a prompt of token ids.
        prompt_token_ids: Tokens of the prompt.
        outputs: The `n` continuations.
        finished: True if all continuations have finished. Intermediate outputs of `LLM.stream` and
            `InferenceEngine.step` have False.
        prompt_logprobs: One entry for each prompt token computed so far; the first entry is None.
            None unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def kv(self) -> RequestKV:
        """Cache statistics of the first continuation so far."""
        return self.outputs[0].kv
