"""Malformed requests, limits and keys: refused with 4xx, and the server continues."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import random
import socket
from typing import Any

import pytest

from dms_train.server.errors import ServerError
from dms_train.server.options import ServerOptions
from tests.support import served_model
from tests.support.served_model import NAME, Running

ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
CASES = 500
_BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
}
_REQUIRED = {route: next(iter(body)) for route, body in _BASE.items()}
# none of these is a value of any field they are put into
_ODD = (
    [[[]]],
    {"a": {"b": []}},
    {"role": "user"},
    [{"role": 5}],
    -(10**30),
    10**400,
    -1.5,
    "\x00" * 3,
    [-1],
    ["", 5],
)
_FIELDS = ("n", "max_tokens", "top_p", "seed", "stop_token_ids", "logit_bias", "stream", "priority")


def malformed(number: int) -> tuple[str, bytes]:
    """A route and a body that it must refuse."""
    rng = random.Random(number)
    route = rng.choice(ROUTES)
    body = dict(_BASE[route])
    good = json.dumps(body).encode()
    kind = number % 10
    if kind == 0:  # cut off
        return route, good[: rng.randrange(len(good) - 1)]
    if kind == 1:  # not UTF-8
        at = good.index(b'"', 5)
        return route, good[:at] + rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80"]) + good[at:]
    if kind == 2:  # nested without end
        opening = rng.choice([b"[", b'{"a":'])
        return route, opening * rng.choice([300, 20_000])
    if kind == 3:  # random bytes
        return route, b"\x01" + rng.randbytes(rng.randrange(60))
    if kind == 4:  # another JSON value
        return route, json.dumps(rng.choice([None, 1, "x", [], [body], True])).encode()
    if kind == 5:  # the field that is needed is missing
        del body[_REQUIRED[route]]
    elif kind == 6:  # or holds something else
        body[_REQUIRED[route]] = rng.choice([5, True, {}, {"a": 1}, [[]], [None], -1, 1e300])
    elif kind == 7:  # an unknown field
        body[f"field{rng.randrange(1000)}"] = rng.choice([1, "x", [], {}])
    elif kind == 8:  # an escape that is no character
        text = json.dumps(body).replace('"the"', '"\\ud800"').replace('"a"', '"\\udfff x"')
        return route, text.replace("[5]", '["\\ud800"]').encode()
    else:  # a number or a type that a field does not take
        body[rng.choice(_FIELDS)] = rng.choice(_ODD)
    return route, json.dumps(body).encode()


@pytest.mark.parametrize("part", range(5))
def test_malformed_requests_are_refused(server: Running, part: int):
    for number in range(part, CASES, 5):
        route, body = malformed(number)
        status, _, answer = server.ask(route, body)
        assert 400 <= status < 500, (number, route, body[:200], answer)
        assert answer["error"]["message"], number
    assert server.ask("/v1/completions", {"prompt": "the", "max_tokens": 1})[0] == 200


def test_nan_and_infinity_are_not_numbers(server: Running):
    for word in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt": "the", "temperature": {word}}}'.encode()
        assert server.ask("/v1/completions", body)[0] == 400, word


def test_a_large_body_is_refused_whether_or_not_its_length_is_stated(server: Running):
    large = json.dumps({"prompt": "x" * 2**20}).encode()
    assert server.ask("/v1/completions", large)[0] == 413
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_other_routes_and_methods_answer_in_the_same_shape(server: Running):
    for path, body, expected in (("/v1/nothing", None, 404), ("/v1/completions", None, 405)):
        status, _, answer = server.ask(path, body)
        assert status == expected
        assert answer["error"]["message"]


def test_a_request_id_is_taken_or_made_and_logged_without_the_prompt(server: Running, caplog):
    with caplog.at_level(logging.INFO, logger="dms_train"):
        body = {"prompt": "seven stones", "max_tokens": 1}
        _, headers, answer = server.ask("/v1/completions", body, X_Request_Id="abc-7")
        assert headers["x-request-id"] == "abc-7"
        assert answer["id"] == "cmpl-abc-7"
        _, made, _ = server.ask("/v1/completions", body, X_Request_Id="not one; at all")
        assert made["x-request-id"].isalnum()
        served_model.wait_for(lambda: made["x-request-id"] in caplog.text)
    assert "abc-7 POST /v1/completions 200" in caplog.text
    assert "seven" not in caplog.text


def test_a_key_is_required(model):
    with served_model.serving(model, api_key="secret") as running:
        body = {"prompt": "the", "max_tokens": 1}
        for path, data in (("/v1/models", None), ("/v1/completions", body), ("/tokenize", body)):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                status, answered, answer = running.ask(path, data, **headers)
                assert status == 401
                assert answered["www-authenticate"] == "Bearer"
                assert answer["error"]["code"] == "invalid_api_key"
        assert running.ask("/health")[0] == running.ask("/metrics")[0] == 200
        assert [m.id for m in running.client(api_key="secret").models.list()] == [NAME]
        for scheme in ("bearer", "BEARER", "bEARER "):
            assert running.ask("/v1/models", Authorization=f"{scheme} secret")[0] == 200
        for wrong in ("Basic secret", "Bearer", "Bearer Secret", "bearersecret"):
            assert running.ask("/v1/models", Authorization=wrong)[0] == 401


def test_a_compressed_body_is_refused(server: Running):
    body = gzip.compress(b'{"prompt": "the"}')
    for coding in ("gzip", "GZIP", "br", "gzip, identity"):
        status, headers, answer = server.ask("/v1/completions", body, Content_Encoding=coding)
        assert status == 415
        assert headers["accept-encoding"] == "identity"
        assert coding in answer["error"]["message"]
    body = {"prompt": "the", "max_tokens": 1}
    assert server.ask("/v1/completions", body, Content_Encoding="Identity")[0] == 200


PAGE, STRANGER = "https://page.example:8443", "https://stranger.example"


@pytest.mark.parametrize("allowed", [(PAGE, "http://localhost"), ("*",), ()], ids=str)
def test_pages_of_the_given_origins_may_use_the_server(model, allowed):
    """As a browser does: it asks without the key first, then sends what was allowed."""
    with served_model.serving(model, api_key="secret", cors_origins=allowed) as running:
        host = running.url.removeprefix("http://")
        for origin in (PAGE, STRANGER):
            asking = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("OPTIONS", "/v1/completions", headers=asking)
            answer = connection.getresponse()
            answer.read()
            granted = "*" in allowed or origin in allowed
            assert (answer.status == 200) == granted
            if granted:
                assert answer.headers["Access-Control-Allow-Origin"] in (origin, "*")
                assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
            for key in ("secret", "wrong"):
                _, headers, _ = running.ask(
                    "/v1/models", Origin=origin, Authorization=f"Bearer {key}"
                )
                shown = headers.get("access-control-allow-origin")
                assert (shown in (origin, "*")) == granted


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://Example.org", ""]
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ServerError, match="--cors-origin"):
        ServerOptions(cors_origins=(origin,))


def test_a_word_that_a_tokenizer_of_whole_words_does_not_know_is_the_senders_fault(tmp_path):
    directory = served_model.write_model(tmp_path)
    words = {"the": 0, "river": 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}  # which is missing
    file = directory / "tokenizer.json"
    described = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    file.write_text(json.dumps(described | {"model": model}))
    (directory / "tokenizer_config.json").unlink()  # of the other tokenizer
    with served_model.serving(directory) as server:
        body = {"prompt": "the river", "max_tokens": 2}
        assert server.ask("/v1/completions", body)[0] == 200
        status, _, answer = server.ask("/v1/completions", {**body, "prompt": "the sea"})
        assert status == 400
        assert "tokenizer" in answer["error"]["message"]
        assert server.ask("/tokenize", {"prompt": "the sea"})[0] == 400
        assert server.ask("/v1/completions", body)[0] == 200


def test_no_message_of_a_chat_is_lost(tmp_path):
    """Roles are those of a template with a branch for each that it knows, and nothing else."""
    directory = served_model.write_model(tmp_path)
    file = directory / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] or m.role == 'system' and "
        "loop.first %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
    )
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    first, user = {"role": "system", "content": "the old stone"}, {"role": "user", "content": "one"}
    with served_model.serving(directory) as server:

        def ask(*messages):
            body = {"messages": messages, "max_tokens": 3, "temperature": 0}
            return server.ask("/v1/chat/completions", body)

        answers = [ask({**first, "role": role}, user)[2] for role in ("system", "developer")]
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["prompt_tokens"] > ask(user)[2]["usage"]["prompt_tokens"]
        for role in ("system", "developer"):
            status, _, answer = ask(user, {**first, "role": role})
            assert status == 400
            assert answer["error"]["param"] == "messages"
            assert "messages.1: the chat template leaves out" in answer["error"]["message"]
