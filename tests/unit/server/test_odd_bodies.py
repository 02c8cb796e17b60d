"""Odd values at every field, and odd bodies: accepted where documented, else refused with 4xx."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.served_model import NAME, VOCABULARY, Running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
USER = {"role": "user", "content": "a"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 1},
    COMPLETION: {"prompt": "the", "max_tokens": 1},
    TOKENIZE: {"prompt": "the"},
    DETOKENIZE: {"tokens": [5]},
}
COUNT = 300
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, -2, 3, 5, 16, 20, 21, 0.0, 1.0, 0.5, 1.5, -0.0, -0.5, 100.5),
    *(5e-324, 1e300, -1e300, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64),
    *(10**30, 10**400, "", "a", "1", "true", "null", "NaN", "\x00", "\U0001f980", "e" * 1001, NAME),
    *(
        [],
        [None],
        [""],
        ["a"],
        ["a", "b"],
        ["a"] * 17,
        "none",
        [[]],
        [[5]],
        [5],
        [-1],
        [VOCABULARY],
    ),
    *(
        [5.0],
        [True],
        ["a", 5],
        [2**70],
        {},
        {"a": 1},
        {"5": 1},
        {"5": True},
        {"5": "1"},
        {"5": 101},
    ),
    *({"05": 1}, {" 5": 1}, {"5.0": 1}, {"-1": 1}, {"\u0665": 1}, {"5": None}, {"5": -100}),
    *({str(VOCABULARY): 1}, {"1" * 30: 1}, {"include_usage": True}, {"include_usage": None}),
    *({"include_usage": 1}, {"type": "text"}, {"role": "user"}, [USER], [USER, None], [{}]),
    *([{"role": "user"}], [{**USER, "content": [[]]}], [{**USER, "x": 1}], [[USER]], USER),
)


def integer(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most


def boolean(value: Any) -> bool:
    return type(value) is bool


def ids(value: Any) -> bool:
    return isinstance(value, list) and all(integer(0, VOCABULARY - 1)(item) for item in value)


def stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= 16
        and all(isinstance(text, str) and 0 < len(text) <= 1000 for text in texts)
    )


def biases(value: Any) -> bool:
    known = {str(token) for token in range(VOCABULARY)}
    return (
        isinstance(value, dict)
        and set(value) <= known
        and all(number(-100, 100)(bias) for bias in value.values())
    )


def prompt(value: Any) -> bool:
    several = value if isinstance(value, list) and value and not ids(value) else [value]
    return all((isinstance(one, str) or ids(one)) and bool(one) for one in several) and (
        len({type(one) for one in several}) == 1
    )


POSITIVE = integer(1, 2**31 - 1)
SHARED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: value == NAME,
    "n": integer(1, 136),  # rows and queue of the server
    "temperature": number(0, 1000),
    "top_p": lambda value: number(0, 1)(value) and value > 0,
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": lambda value: number(0, 1000)(value) and value > 0,
    "logit_bias": biases,
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stops,
    "stop_token_ids": ids,
    "ignore_eos": boolean,
    "priority": integer(-(2**31), 2**31 - 1),
    "stream": boolean,
}
VALID: dict[str, dict[str, Callable[[Any], bool]]] = {
    CHAT: {
        **SHARED,
        "messages": lambda value: value == [USER],
        "max_tokens": POSITIVE,
        "max_completion_tokens": integer(1, 1),  # beside max_tokens=1
        "logprobs": boolean,
        "chat_template_kwargs": lambda value: value == {},
        "add_generation_prompt": boolean,
        "continue_final_message": lambda value: value is False,
        "tools": lambda value: value == [],
        "tool_choice": lambda value: value == "none",
        "response_format": lambda value: value == {"type": "text"},
        "reasoning_effort": lambda value: False,
        "unknown": lambda value: False,
    },
    COMPLETION: {
        **SHARED,
        "prompt": prompt,
        "max_tokens": POSITIVE,
        "logprobs": integer(0, 20),
        "echo": boolean,
        "best_of": integer(1, 1),
        "suffix": lambda value: value == "",
        "guided_json": lambda value: False,
    },
    TOKENIZE: {"prompt": lambda value: isinstance(value, str), "add_special_tokens": boolean},
    DETOKENIZE: {"tokens": ids, "unknown": lambda value: False},
}
NEEDED = {"messages", "prompt", "tokens"}  # null is no value of these
PLACES = [(route, field) for route, fields in VALID.items() for field in fields]


def refused(status: int, answer: Any) -> bool:
    """Return True if a request was refused in OpenAI's shape."""
    if status == 200:
        return False
    assert 400 <= status < 500, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 1000
    assert "\n" not in error["message"]
    return True


@pytest.mark.parametrize("part", range(6))
def test_odd_values_are_accepted_where_they_are_documented(server: Running, part: int):
    rng = random.Random(part)
    for _ in range(COUNT // 6):
        route, field = rng.choice(PLACES)
        value = rng.choice(ODD)
        found = server.ask(route, {**BASE[route], field: value})
        valid = field not in NEEDED if value is None else VALID[route][field](value)
        assert refused(found[0], found[2]) != valid, (route, field, value, found[2])


BODIES = {
    "a field twice": b'{"prompt": "the", "temperature": 0, "temperature": 2}',
    "a bias twice": b'{"prompt": "the", "logit_bias": {"5": 1, "5": -1}}',
    "the same field escaped": b'{"prompt": "the", "n": 1, "\\u006e": 2}',
    "NaN": b'{"prompt": "the", "temperature": NaN}',
    "a number above all floats": b'{"prompt": "the", "temperature": 1e999}',
    "a number of 5,000 digits": b'{"prompt": "the", "seed": ' + b"9" * 5000 + b"}",
    "half of a surrogate pair": b'{"prompt": "\\ud83e"}',
    "a surrogate in a field": b'{"prompt": "the", "\\udd80": 1}',
    "UTF-16": '{"prompt": "the"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "the"}',
    "nothing": b"",
    "two objects": b'{"prompt": "the"}{}',
    "a comma at the end": b'{"prompt": "the",}',
    "deep": b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
    "too deep": b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "a form": b"prompt=the&max_tokens=1",
}


@pytest.mark.parametrize("name", BODIES)
def test_odd_bodies_are_refused(server: Running, name: str):
    status, _, answer = server.ask(COMPLETION, BODIES[name])
    assert refused(status, answer)


def test_a_field_that_is_given_twice_is_named(server: Running):
    for name, field in (("a field twice", "temperature"), ("a bias twice", "5")):
        error = server.ask(COMPLETION, BODIES[name])[2]["error"]
        assert error["message"] == f"{field}: given twice; send it once"


@pytest.mark.parametrize("key", ["05", " 5", "5 ", "5.0", "-5", "+5", "5_0", "\u0665", "", "e"])
def test_a_bias_takes_token_ids_as_they_are_written(server: Running, key: str):
    status, _, answer = server.ask(COMPLETION, {**BASE[COMPLETION], "logit_bias": {key: 1}})
    assert refused(status, answer)
    assert answer["error"]["message"] == f"logit_bias.{key}: keys are token ids"


def test_depth_in_the_variables_of_a_template(server: Running):
    for depth in (100, 10**5):
        given = b'{"enable_thinking": ' + b"[" * depth + b"]" * depth + b"}"
        body = json.dumps({**BASE[CHAT], "chat_template_kwargs": "here"}).encode()
        status, _, answer = server.ask(CHAT, body.replace(b'"here"', given))
        assert refused(status, answer) == (depth > 200)


def test_the_stated_type_of_a_body_is_not_read(server: Running):
    body = json.dumps(BASE[COMPLETION]).encode()
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded", "x"):
        assert server.ask(COMPLETION, body, Content_Type=kind)[0] == 200


def test_other_routes_and_models_answer_in_the_same_shape(server: Running):
    for path, body in (
        ("/v1/score", {"prompt": "the"}),
        ("/v1/embeddings", {"input": "the"}),
        (COMPLETION, {**BASE[COMPLETION], "model": ""}),
        (CHAT, {**BASE[CHAT], "model": "gpt-4o"}),
        (TOKENIZE, {**BASE[TOKENIZE], "model": "gpt-4o"}),
    ):
        status, _, answer = server.ask(path, body)
        assert refused(status, answer), path
