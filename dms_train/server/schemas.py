"""What clients send: OpenAI's fields and vLLM's extras, checked by pydantic.

A field that is null counts as not given. A field without effect on the answer is accepted; any
unknown field is refused, so that no option is silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dms_train.inference.options import SamplingParams
from dms_train.server.errors import ApiError

_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
# values of unsupported fields that equal what the server does anyway
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
_REASONS = {
    "tools": "tool calls are not supported",
    "tool_choice": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "function_call": "tool calls are not supported",
    "response_format": "only text is supported",
    "echo": "the prompt is not repeated in the answer",
    "suffix": "the model continues a prompt and does not fill gaps",
    "modalities": "only text is supported",
}
T = TypeVar("T", bound=BaseModel)
_MOST_TOKENS = 2**31 - 1
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_TokenId = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
_Tokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class GenerationBody(_Body):
    """Fields that chat and plain completions share."""

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
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    kv_positions: bool = False

    def sampling(
        self, max_tokens: int, logprobs: int | None, *, of_prompt: bool = False
    ) -> SamplingParams:
        """The engine's parameters.

        Args:
            max_tokens: Most tokens to generate.
            logprobs: Alternatives to return with every token; None for no log-probabilities.
            of_prompt: Whether those of the prompt are returned too.

        Raises:
            ApiError: `logit_bias` has a key that is no token id.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()},
            logprobs=logprobs,
            prompt_logprobs=logprobs if of_prompt else None,
            seed=self.seed,
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

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
        """One or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeBody(_Body):
    """`/tokenize`."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    """`/detokenize`."""

    tokens: Annotated[list[_TokenId], Field(max_length=2**20)]


def parse(body: bytes, kind: type[T]) -> T:
    """A body as one of the classes above.

    Raises:
        ApiError: 400 that names the field and what it takes.
    """
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        return kind.model_validate(_effective(given))
    except ValidationError as error:
        raise _refusal(error) from None
    except OverflowError:
        raise ApiError(400, "a number is too large") from None


def _effective(given: dict[str, Any]) -> dict[str, Any]:
    """Fields without those that are null, without effect or neutral."""
    return {
        name: value
        for name, value in given.items()
        if value is not None
        and name not in _WITHOUT_EFFECT
        and not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ()))
    }


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _refusal(error: ValidationError) -> ApiError:
    """The first problem of a body."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    name = field[:100]
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        reason = _REASONS.get(field, "this server does not know the field; leave it out")
        return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
    place = ".".join(str(part) for part in problem["loc"])[:200]
    return ApiError(400, f"{place}: {problem['msg']}", param=name, code="invalid_value")


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _all_ids(value: Any) -> bool:
    return _all(value, int) and all(0 <= item <= _MOST_TOKENS for item in value)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11):
        raise ApiError(400, "logit_bias: keys are token ids", param="logit_bias")
    return int(key)
