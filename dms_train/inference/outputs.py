"""What a request returns, in vLLM's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dms_train.inference.accounting import RequestKV


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token, before temperature, penalties and bias.

    Attributes:
        logprob: Of the token itself.
        top: Of the most likely tokens, by token id; the first one is what temperature 0 takes.
        text_offset: Where the text of the token starts in the text of the continuation.
    """

    logprob: float
    top: dict[int, float]
    text_offset: int = 0


class GivenScores(NamedTuple):
    """Scores of given tokens, in their order.

    Attributes:
        logprobs: Log-probability of each, before temperature, penalties and bias.
        greedy: Whether temperature 0 takes it.
    """

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: Its number among the `n` of the request.
        text: Decoded tokens up to a stop text; empty for a model without a tokenizer. While it
            runs, it only grows: what may still change is left out.
        token_ids: Generated tokens, the one that stopped them included; those that were given to
            `InferenceEngine.add_scoring`.
        finish_reason: `stop`, `length`, `timeout` (the request's time was over), `memory` (the
            cache cannot hold it), or None while it runs.
        logprobs: One entry for each of `token_ids`; None unless asked for.
        scores: Of `token_ids` that were given to `InferenceEngine.add_scoring`; None for generated
            ones.
        kv: What the cache has cost so far.
        seconds: From `add_request`, or the turn of a conversation, to the newest generated token.
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
        prompt: Text, or None for a prompt of token ids.
        prompt_token_ids: Its tokens.
        outputs: The `n` continuations.
        finished: Whether all have finished; False for the intermediate outputs of `LLM.stream` and
            `InferenceEngine.step`.
        prompt_logprobs: One entry for each token of the prompt, as far as it is computed, None for
            the first one; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def kv(self) -> RequestKV:
        """What the cache of the first continuation has cost so far."""
        return self.outputs[0].kv
