"""Request bodies: OpenAI's fields and vLLM's extras, checked by pydantic.

A null field counts as absent. A known field without effect on the answer is accepted. Any unknown
field is refused, so that no option is silently ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dms_train.inference.options import SamplingParams
from dms_train.server.errors import ApiError

_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
# values of unsupported fields that match the server's behaviour: OpenAI's, then vLLM's
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "echo": (False,),
    "suffix": ("",),
    "include_obfuscation": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "continuous_usage_stats": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_strs": (False,),
}
_NO_TOOLS = "tool calls are not supported; leave it out"
_NOT_GUIDED = "guided decoding is not supported; the server generates free text"
_ONLY_TEXT = "only text is supported"
_REASONS = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "response_format": _NOT_GUIDED,
    "structured_outputs": _NOT_GUIDED,
    "guided_json": _NOT_GUIDED,
    "guided_regex": _NOT_GUIDED,
    "guided_choice": _NOT_GUIDED,
    "guided_grammar": _NOT_GUIDED,
    "echo": "the prompt is not repeated in the answer",
    "suffix": "the model continues a prompt and does not fill gaps",
    "modalities": _ONLY_TEXT,
    "audio": _ONLY_TEXT,
    "web_search_options": "the server searches nothing; leave it out",
    "moderation": "the server moderates nothing; leave it out",
    "reasoning_effort": "choose the thinking mode of a model with chat_template_kwargs",
    "verbosity": "the length of an answer is up to the model; leave it out",
    "chat_template": "the template of the model directory is used; leave it out",
}
T = TypeVar("T", bound=BaseModel)
_MOST_TOKENS = 2**31 - 1
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_TokenId = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
_Tokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class _Fields(BaseModel):
    """Object of a request; null, neutral and ineffective fields count as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _effective(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None
            and name not in _WITHOUT_EFFECT
            and not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ()))
        }


class _Body(_Fields):
    model: str | None = None


class StreamOptions(_Fields):
    """Options of a streamed answer."""

    include_usage: bool = False


class GenerationBody(_Body):
    """Fields shared by chat and plain completions."""

    n: Annotated[int, Field(ge=1, le=1024)] = 1
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] = 1.0
    logit_bias: dict[str, _Bias] = Field(default_factory=dict, max_length=1024)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[_Stop], Field(max_length=16), BeforeValidator(_as_list)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    kv_positions: bool = False

    def sampling(
        self, max_tokens: int, logprobs: int | None, *, of_prompt: bool = False
    ) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            max_tokens: Most tokens to generate.
            logprobs: Number of alternatives to return with every token; None for no
                log-probabilities.
            of_prompt: True to return log-probabilities of the prompt too.

        Raises:
            ApiError: `logit_bias` has a key that is no token id.
        """
        same = {field.name for field in fields(SamplingParams)} & type(self).model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in same}
        values |= {
            "max_tokens": max_tokens,
            "top_k": self.top_k or -1,
            "logit_bias": {_token_id(key): bias for key, bias in self.logit_bias.items()},
            "logprobs": logprobs,
            "prompt_logprobs": logprobs if of_prompt else None,
        }
        return SamplingParams(**values)


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    echo: bool = False
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if not (isinstance(value, str) or _all(value, str) or _all_ids(value)) and not (
            _all(value, list) and all(map(_all_ids, value))
        ):
            raise ValueError("text, token ids, or a list of either that is not empty")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Any], Field(min_length=1, max_length=4096)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None if the request does not limit them.

        Raises:
            ApiError: Both fields are given, and they differ.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise ApiError(
                400,
                f"max_completion_tokens={new}: max_tokens={old} differs; send one of them",
                param="max_completion_tokens",
            )
        return new or old


class TokenizeBody(_Body):
    """Body of `/tokenize`."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    """Body of `/detokenize`."""

    tokens: Annotated[list[_TokenId], Field(max_length=2**20)]


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a body as one of the classes above.

    Raises:
        ApiError: 400; its line names the field and the valid values.
    """
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
        json.loads(body, object_pairs_hook=_require_unique)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    except OverflowError:
        raise ApiError(400, "a number is too large") from None


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object that has a field twice, because one of the values would be ignored."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        twice = names.most_common(1)[0][0][:100]
        raise ApiError(400, f"{twice}: given twice; send it once", param=twice)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _refusal(error: ValidationError) -> ApiError:
    """Return the first problem of a body."""
    problem = error.errors(include_url=False, include_context=False)[0]
    names = [str(part) for part in problem["loc"]]
    path, name = ".".join(names)[:200], names[0][:100]
    where = path + _shown(problem["input"], names)
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ")
        return ApiError(400, f"{where}: {message}", param=name, code="invalid_value")
    reason = _REASONS.get(names[-1], "this server does not know the field; leave it out")
    return ApiError(400, f"{where}: {reason}", param=name, code="unsupported_parameter")


def _shown(value: Any, names: list[str]) -> str:
    """Return a short value for a message; parts of a prompt are never shown."""
    if isinstance(value, list | dict) or names[0] in ("prompt", "messages"):
        return ""
    text = repr(value)
    return f"={text}" if len(text) <= 60 else f"={text[:60]}..."


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _all_ids(value: Any) -> bool:
    return _all(value, int) and all(0 <= item <= _MOST_TOKENS for item in value)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11 and key == str(int(key))):
        raise ApiError(400, f"logit_bias.{key[:60]}: keys are token ids", param="logit_bias")
    return int(key)
