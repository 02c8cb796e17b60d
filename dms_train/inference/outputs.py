"""What a request returns, in vLLM's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.inference.accounting import RequestKV


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: Always 0.
        text: Decoded tokens up to a stop text; empty for a model without a tokenizer.
        token_ids: Generated tokens, the one that stopped them included.
        finish_reason: `stop`, `length`, or None while it runs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Output of a request.

    Attributes:
        request_id: Number in the order of arrival.
        prompt: Text, or None for a prompt of token ids.
        prompt_token_ids: Its tokens.
        outputs: One continuation.
        finished: False for the intermediate outputs of `LLM.stream` and `InferenceEngine.step`.
        kv: What the cache has cost so far.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    kv: RequestKV
