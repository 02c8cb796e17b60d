"""Builder of requests: checks and encodes the prompts that users pass."""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

from dms_train.inference.checks import Range, integer, number, token_ids
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import SamplingParams
from dms_train.inference.sequence import Request, Sequence
from dms_train.inference.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]
_PRIORITY = Range(-math.inf, math.inf, "an integer")
_SECONDS = Range(0, math.inf, "a number of at least 0")


def checked_params(given: Any) -> SamplingParams:
    """Return checked sampling parameters; None gives the defaults.

    Raises:
        InferenceError: The value has a wrong type.
    """
    params = SamplingParams() if given is None else given
    if not isinstance(params, SamplingParams):
        raise InferenceError(f"sampling_params={given!r}: must be SamplingParams(...)")
    return params


class RequestBuilder:
    """Builder that numbers requests in the order of arrival, and checks and encodes their prompts.

    Args:
        tokenizer: Tokenizer of the model; without one, prompts must be token ids.
        stop_ids: End-of-text tokens of the model.
        vocab_size: Size of the vocabulary.
        longest: Most tokens of a sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop_ids: frozenset[int],
        vocab_size: int,
        longest: int,
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._vocab_size, self._longest = vocab_size, longest
        self._arrived = 0

    def request(
        self, params: SamplingParams, *, priority: int = 0, timeout_s: float | None = None
    ) -> Request:
        """Create a request without tokens.

        Args:
            params: Sampling parameters; only `n` and `seed` are used.
            priority: Lower values go first.
            timeout_s: Seconds after which the request ends with the tokens it has; None for no
                limit.

        Raises:
            InferenceError: The priority or the timeout has a wrong type or is out of range.
        """
        priority = integer("priority", priority, _PRIORITY)
        if timeout_s is not None:
            timeout_s = number("timeout_s", timeout_s, _SECONDS)
        request_id, self._arrived = str(self._arrived), self._arrived + 1
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                seed=seed,
                arrival=int(request_id),
                priority=priority,
                deadline=deadline,
            )
            for index in range(params.n)
        ]
        for sequence in sequences[1:]:
            sequence.prefix_leader = sequences[0]
        return Request(request_id=request_id, sequences=sequences)

    def add_prompt(
        self, request: Request, prompt: Prompt, params: SamplingParams, *, new_tokens: int = 1
    ) -> None:
        """Append a prompt to a request.

        Args:
            request: The request.
            prompt: Text or token ids.
            params: Sampling parameters.
            new_tokens: Number of tokens after the prompt for which the model must have room.

        Raises:
            InferenceError: The prompt is empty, too long or not of this vocabulary, or a text
                needs a tokenizer and the model has none.
        """
        before = request.sequences[0].tokens
        text, tokens = self._encode(prompt, first=not before)
        longest = self._longest
        length = len(before) + len(tokens)
        if length + new_tokens > longest:
            raise InferenceError(f"a prompt of {length} tokens: the model takes {longest}")
        if params.stop and self._tokenizer is None:
            raise InferenceError("stop: the model has no tokenizer.json; use stop_token_ids")
        self.checked_ids("logit_bias", params.logit_bias)
        self.checked_ids("stop_token_ids", params.stop_token_ids)
        request.prompt = text
        for sequence in request.sequences:
            sequence.add_prompt(tokens, params, self._tokenizer, self._stop_ids, longest)

    def checked_ids(self, where: str, given: Any) -> list[int]:
        """Return token ids of the vocabulary as Python integers.

        Args:
            where: Name of the argument, for the message.
            given: A list, an array or a tensor.

        Raises:
            InferenceError: A value is not an integer or not in the vocabulary.
        """
        return token_ids(where, given, self._vocab_size)

    def _encode(self, prompt: Prompt, *, first: bool) -> tuple[str | None, list[int]]:
        """Check a prompt, and return its text and tokens."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InferenceError("the model has no tokenizer.json; give token ids")
            text, tokens = prompt, self._tokenizer.encode(prompt, special=first)
        else:
            ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
            text, tokens = None, self.checked_ids("prompt_token_ids", ids)
        if not tokens:
            raise InferenceError("a prompt is empty; give at least one token")
        return text, tokens
