"""Every field of OpenAI's own request types: it acts, has no effect, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import (
    chat_completion_stream_options_param,
)
from openai.types.chat import completion_create_params as chats

from tests.support.served_model import NAME, Running

CHAT = [{"role": "user", "content": "seven old birds"}]
SHARED = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "model": NAME}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, **SHARED},
    "/v1/completions": {"prompt": "seven old birds", **SHARED},
}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Values of a field by what they do, and what else the request needs.

    `compared` is false where the answer without the field is random.
    """

    acts: tuple[Any, ...] = ()
    ignored: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    beside: dict[str, Any] = field(default_factory=dict)
    nullable: bool = True
    compared: bool = True


REPEATS = {"temperature": 0, "max_tokens": 30}
SAMPLED = {
    "model": Expected(ignored=(NAME,)),
    "frequency_penalty": Expected(acts=(2.0,), ignored=(0,), beside=REPEATS),
    "presence_penalty": Expected(acts=(2,), ignored=(0.0,), beside=REPEATS),
    "logit_bias": Expected(acts=({"70": 100},), ignored=({},)),
    "max_tokens": Expected(acts=(3,), refused=(2.5,)),
    "n": Expected(acts=(2,), ignored=(1,), refused=(True,)),
    "seed": Expected(acts=(-5, 2**63 - 1), refused=(2**64,), compared=False),
    "stop": Expected(
        acts=(["x", "e"], "e"), ignored=([],), refused=([None],), beside={"logit_bias": {"71": 100}}
    ),
    "stream": Expected(acts=(True,), ignored=(False,)),
    "temperature": Expected(acts=(0,), refused=(-1,)),
    "top_p": Expected(acts=(0.01,), ignored=(1,)),
    "user": Expected(ignored=("me",)),
    "stream_options": Expected(acts=({"include_usage": True},), beside={"stream": True}),
}
CHAT_FIELDS = {
    **SAMPLED,
    "messages": Expected(acts=([{"role": "user", "content": "five"}],), nullable=False),
    "logprobs": Expected(acts=(True,), ignored=(False,)),
    "top_logprobs": Expected(acts=(2,), beside={"logprobs": True}),
    # a long prompt, because the model continues to its last position without a limit
    "max_tokens": Expected(
        acts=(3,), refused=(2.5,), beside={"messages": [{"role": "user", "content": "7" * 980}]}
    ),
    "max_completion_tokens": Expected(ignored=(6,), refused=(3,)),  # beside max_tokens
    "metadata": Expected(ignored=({"a": "b"},)),
    "store": Expected(ignored=(True,)),
    "service_tier": Expected(ignored=("flex",)),
    "safety_identifier": Expected(ignored=("me",)),
    "prompt_cache_key": Expected(ignored=("k",)),
    "prompt_cache_options": Expected(ignored=({"mode": "explicit"},)),
    "prompt_cache_retention": Expected(ignored=("24h",)),
    "parallel_tool_calls": Expected(ignored=(True, False)),
    "prediction": Expected(ignored=({"type": "content", "content": "x"},)),
    "tools": Expected(ignored=([],), refused=([TOOL],)),
    "tool_choice": Expected(ignored=("none",), refused=("auto", "required", TOOL)),
    "functions": Expected(ignored=([],), refused=([{"name": "f"}],)),
    "function_call": Expected(ignored=("none",), refused=("auto", {"name": "f"})),
    "response_format": Expected(
        ignored=({"type": "text"},), refused=({"type": "json_object"}, SCHEMA)
    ),
    "modalities": Expected(ignored=(["text"],), refused=(["text", "audio"],)),
    "audio": Expected(refused=({"voice": "ash", "format": "mp3"},)),
    "moderation": Expected(refused=({"model": "omni-moderation-latest"},)),
    "reasoning_effort": Expected(refused=("none", "low")),
    "verbosity": Expected(ignored=("medium",), refused=("low",)),
    "web_search_options": Expected(refused=({},)),
}
COMPLETION_FIELDS = {
    **SAMPLED,
    "prompt": Expected(acts=("five", [5, 6]), refused=(5,), nullable=False),
    "best_of": Expected(ignored=(1,), refused=(3,)),
    "echo": Expected(acts=(True,), ignored=(False,)),
    "logprobs": Expected(acts=(0, 2), refused=(21,)),
    "suffix": Expected(ignored=("",), refused=("end",)),
}
STREAM_FIELDS = {
    "include_usage": Expected(acts=(True,), ignored=(False,)),
    "include_obfuscation": Expected(ignored=(False,), refused=(True,)),
}
FIELDS = {"/v1/chat/completions": CHAT_FIELDS, "/v1/completions": COMPLETION_FIELDS}


def names(module: Any, *classes: str) -> set[str]:
    """Fields of OpenAI's typed dictionaries."""
    return {name for found in classes for name in get_type_hints(getattr(module, found))}


BASES = ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")


def test_the_tables_name_every_field_of_openai():
    assert set(CHAT_FIELDS) == names(chats, *BASES)
    assert set(COMPLETION_FIELDS) == names(completions, *BASES)
    options = names(chat_completion_stream_options_param, "ChatCompletionStreamOptionsParam")
    assert set(STREAM_FIELDS) == options


def content(answer: Any) -> Any:
    """Return an answer as a client sees it, without what differs from request to request."""
    if isinstance(answer, str):  # a stream
        parts = [line.partition("data: ")[2] for line in answer.splitlines() if line]
        return [part.partition('"choices"')[2] for part in parts]
    return answer["choices"]


@pytest.mark.parametrize(
    ("route", "name"), [(route, name) for route, fields in FIELDS.items() for name in fields]
)
def test_a_field_acts_has_no_effect_or_is_refused(server: Running, route: str, name: str):
    expected = FIELDS[route][name]
    base = {**BODIES[route], **expected.beside}

    def ask(**changes: Any) -> tuple[int, Any]:
        body = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        status, _, answer = server.ask(route, body)
        return status, answer

    without = content(ask(**{name: ...})[1]) if expected.nullable else None
    for value in (None, *expected.ignored) if expected.nullable else ():
        status, answer = ask(**{name: value})
        assert status == 200, (value, answer)
        assert content(answer) == without or not expected.compared, value
    for value in expected.acts:
        status, answer = ask(**{name: value})
        assert status == 200, (value, answer)
        assert content(answer) != without, value
    for value in expected.refused:
        status, answer = ask(**{name: value})
        assert status == 400, value
        assert answer["error"]["message"].startswith(name)
        assert answer["error"]["param"] == name


@pytest.mark.parametrize("name", STREAM_FIELDS)
def test_a_field_of_the_stream_options(server, name):
    route, expected = "/v1/chat/completions", STREAM_FIELDS[name]
    base = {**BODIES[route], "stream": True}
    reference = content(server.ask(route, base)[2])
    for value in (None, *expected.ignored):
        _, _, answer = server.ask(route, {**base, "stream_options": {name: value}})
        assert content(answer) == reference
    for value in expected.acts:
        assert content(server.ask(route, {**base, "stream_options": {name: value}})[2]) != reference
    for value in expected.refused:
        status, _, answer = server.ask(route, {**base, "stream_options": {name: value}})
        assert status == 400
        assert answer["error"]["message"].startswith(f"stream_options.{name}={value}")
