"""Many requests at a time: streams, clients that leave, a full queue, a step that fails."""

from __future__ import annotations

import http.client
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest

from tests.support import served_model
from tests.support.served_model import NAME, Running, wait_for

STREAMS = int(os.environ.get("DMS_TEST_STREAMS", "24"))
LONG = {"prompt": "the river", "max_tokens": 900, "ignore_eos": True, "stream": True}


def connect(server: Running) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)


def open_stream(server: Running) -> http.client.HTTPResponse:
    """A stream whose first event has come; closing it leaves the server."""
    connection = connect(server)
    connection.request("POST", "/v1/completions", json.dumps(LONG), {"Connection": "close"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.readline().startswith(b"data: {")
    return answer


def test_concurrent_streams_give_what_each_gives_alone(model):
    """Greedy, of different lengths; more of them than the engine has rows."""
    options = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
    rows = max(4, STREAMS // 4)
    with served_model.serving(model, engine={"max_num_seqs": rows}, max_queue=STREAMS) as server:
        client = server.client()

        def one(number: int) -> str:
            stream = client.completions.create(
                prompt=[5 + number % 7, 9, 30 + number % 11],
                max_tokens=10 + number % 5,
                stream=True,
                **options,
            )
            return "".join(chunk.choices[0].text for chunk in stream)

        with ThreadPoolExecutor(STREAMS) as threads:
            together = list(threads.map(one, range(STREAMS)))
        server.wait_until_idle()
        some = range(0, STREAMS, max(1, STREAMS // 8))
        assert [together[i] for i in some] == [one(i) for i in some]


def test_the_memory_of_clients_that_leave_is_freed(server: Running):
    server.wait_until_idle()
    before, rows = server.engine.allocated_bytes, server.engine.free_batch_slots
    opened = [open_stream(server) for _ in range(5)]
    waiting = connect(server)  # no stream: leaves while it waits for the whole answer
    waiting.request("POST", "/v1/completions", json.dumps({**LONG, "stream": False}))
    wait_for(lambda: server.server.admission.inside == 6)
    assert server.gauge("dms_cache_allocated_bytes") > before
    for connection in (*opened, waiting):
        connection.close()
    server.wait_until_idle()
    wait_for(lambda: server.engine.allocated_bytes == before)
    assert server.engine.free_batch_slots == rows
    assert server.ask("/v1/completions", {"prompt": "the", "max_tokens": 2})[0] == 200


def test_a_full_queue_answers_429(model):
    with served_model.serving(model, engine={"max_num_seqs": 1}, max_queue=1) as server:
        body = {"prompt": "the", "max_tokens": 2}
        with ThreadPoolExecutor(2) as threads, server.paused():
            inside = [threads.submit(server.ask, "/v1/completions", body) for _ in range(2)]
            wait_for(lambda: server.server.admission.inside == 2)
            status, headers, answer = server.ask("/v1/completions", body)
            with pytest.raises(openai.RateLimitError):
                server.client().completions.create(model=NAME, **body)
            assert server.ask("/health")[0] == 200
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert "queue" in answer["error"]["message"]
        assert [future.result()[0] for future in inside] == [200, 200]
        assert server.ask("/v1/completions", {**body, "n": 3})[0] == 400


def test_a_failed_step_ends_its_requests_only(model, monkeypatch):
    with served_model.serving(model, engine={"max_num_seqs": 1}) as server:
        runner, compute = server.engine._runner, server.engine._runner.step
        fail = threading.Event()
        fail.set()

        def step(*args, **kwargs):
            if fail.is_set():
                fail.clear()
                raise RuntimeError("a broken kernel")
            return compute(*args, **kwargs)

        monkeypatch.setattr(runner, "step", step)
        body = {"prompt": "the", "max_tokens": 3}
        with ThreadPoolExecutor(2) as threads, server.paused():
            pending = [threads.submit(server.ask, "/v1/completions", body) for _ in range(2)]
            wait_for(lambda: server.server.admission.inside == 2)
        answers = [future.result() for future in pending]
        assert sorted(status for status, _, _ in answers) == [200, 500]
        failed = next(answer for status, _, answer in answers if status == 500)
        assert failed["error"]["type"] == "server_error"
        assert server.gauge("dms_failed_steps") == 1
        fail.set()
        stream = server.client().completions.create(model=NAME, stream=True, **body)
        with pytest.raises(openai.APIError, match="forward pass"):
            list(stream)
        assert server.ask("/v1/completions", body)[0] == 200


def test_a_request_ends_after_its_time(model):
    with served_model.serving(model, request_seconds=0.3) as server:
        body = {"prompt": "the", "max_tokens": 1000, "ignore_eos": True}
        status, _, answer = server.ask("/v1/completions", body)
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "timeout"
        assert answer["usage"]["completion_tokens"] < 1000


def test_live_positions_are_what_the_cache_counts(server: Running):
    """Against the meters: as many positions as live tokens; the window is always there."""
    body = {"prompt": "the river and", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    connection = connect(server)
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True, "kv_positions": True})
    )
    lines = connection.getresponse().read().decode().split("\n\n")
    views = [
        json.loads(line.removeprefix("data: "))["choices"][0]["kv"] for line in lines if "{" in line
    ]
    pieces = 0
    for view in views:
        pieces += len(view["pieces"])
        heads = [head for layer in view["positions"] for head in layer]
        assert len(heads) == 2 * 2
        for head in heads:
            assert head == sorted(set(head))
            assert set(range(max(0, view["tokens"] - 8), view["tokens"])) <= set(head)
        mean = sum(map(len, heads)) / len(heads)
        assert view["cr_factor"] == pytest.approx(view["tokens"] / mean)
    whole = server.ask("/v1/completions", body)[2]["usage"]
    assert pieces == whole["total_tokens"]
    assert views[-1]["cr_factor"] == pytest.approx(whole["kv"]["cr_factor"])
    first_head = [set(view["positions"][0][0]) for view in views]
    assert any(before - after for before, after in pairwise(first_head))
    server.wait_until_idle()
    assert server.engine.allocated_bytes == server.gauge("dms_cache_allocated_bytes")
