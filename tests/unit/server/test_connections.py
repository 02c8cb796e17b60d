"""Clients that hold a connection: silent ones, half requests, answers that are not read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from dms_train.server import connections
from tests.support import served_model
from tests.support.served_model import Running, wait_for

SMALL = 4096  # bytes of a socket's buffer, so that little is in flight
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = {"prompt": "the river", "max_tokens": 300, "ignore_eos": True, "logprobs": 20}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(connections, "SEND_SECONDS", 1.0)


@contextlib.contextmanager
def connected(server: Running, data: bytes = b"") -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        connection.sendall(data)
        yield connection


@contextlib.contextmanager
def serving(model, **options) -> Iterator[Running]:
    """A server whose connections hold little of an answer that is not read."""
    with served_model.serving(model, **options) as server:
        (listening,) = server.server._http.servers[0].sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        yield server


def post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        len(data),
        data,
    )


def read_answer(connection: socket.socket) -> bytes:
    """One answer to `GET`."""
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(4096)
    return data


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


def open_connections(server: Running) -> int:
    return len(server.server._http.server_state.connections)


@pytest.mark.usefixtures("hasty")
def test_connections_without_a_whole_header_are_closed(model):
    with serving(model) as server:
        with connected(server) as silent, connected(server, GET[:20]) as half:
            assert is_closed(silent)
            assert is_closed(half)
        with connected(server, GET) as again:
            assert read_answer(again).startswith(b"HTTP/1.1 200")
            again.sendall(GET[:20])  # of the second request on this connection
            assert is_closed(again)
        assert server.ask("/health")[0] == 200


@pytest.mark.usefixtures("hasty")
def test_a_body_that_drips_in_after_its_answer_is_not_waited_for(model):
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with serving(model) as server, connected(server, head) as connection:
        assert read_answer(connection).startswith(b"HTTP/1.1 404")

        def drips() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            time.sleep(0.05)
            return open_connections(server) == 0

        wait_for(drips)


def test_the_place_of_an_answer_that_is_not_read_is_free_when_the_engine_has_finished(model):
    with (
        serving(model, engine={"max_num_seqs": 1}, max_queue=0) as server,
        connected(server, post({**LARGE, "stream": True})) as stream,
    ):
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.server.admission.inside == 0)
        assert server.server.admission._requests == 1  # the answer is still being sent
        status, _, _ = server.ask("/v1/completions", {"prompt": "the", "max_tokens": 2})
        assert status == 200


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_not_read_is_given_up(model, stream):
    with (
        serving(model) as server,
        connected(server, post({**LARGE, "stream": stream})) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.server.admission._requests == 0 and not open_connections(server))
        server.wait_until_idle()
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**16):
                rest += part
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"}")


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_is_read_slowly_arrives_whole(model):
    with serving(model) as server, connected(server, post(LARGE)) as connection:
        data = connection.recv(100)
        end = time.monotonic() + 3 * connections.SEND_SECONDS
        while time.monotonic() < end:
            data += connection.recv(1500)
            time.sleep(0.1)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        assert len(body) < length  # it takes longer than an answer that is not read may take
        while len(body) < length:
            part = connection.recv(2**16)
            assert part, "the server has closed the connection"
            body += part
        assert json.loads(body)["usage"]["completion_tokens"] == LARGE["max_tokens"]


def test_the_oldest_idle_connection_makes_room_for_a_new_one(model, monkeypatch):
    monkeypatch.setattr(connections, "_SPARE", 4)
    monkeypatch.setattr(connections, "HEADER_SECONDS", 3600.0)
    most = 2 + 4
    with (
        serving(model, engine={"max_num_seqs": 1}, max_queue=1) as server,
        connected(server, post({**LARGE, "stream": True})) as stream,
        contextlib.ExitStack() as stack,
    ):
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        idle = [stack.enter_context(connected(server)) for _ in range(5 * most)]
        assert is_closed(idle[0])
        assert server.ask("/health")[0] == 200
        assert open_connections(server) <= most
        data = b""
        while part := stream.recv(2**16):
            data += part
            if b"[DONE]" in data:
                return
        raise AssertionError("the server has closed a connection that is in use")
