"""`dms-serve` as a process: its start, its end after a signal, and the page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import served_model
from tests.support.commands import forked_python
from tests.support.served_model import ask, wait_for

pytestmark = pytest.mark.timeout(300)
STREAM = {"prompt": "the river", "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.write_model(tmp_path_factory.mktemp("served"))


class Process:
    """A server in a process of its own and what it writes to stderr.

    Args:
        model: To serve.
        words: Further arguments.
        module: What to run.
        descriptors: Most open files; None leaves the limit.
        python: What starts the module.
        environment: Further variables.
    """

    def __init__(
        self,
        model: Path,
        *words: str,
        module: str = "dms_train.cli.serve",
        descriptors: int | None = None,
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        limit = () if descriptors is None else ("prlimit", f"--nofile={descriptors}")
        command = (*limit, python, "-m", module, str(model), "--port", "0", *words)
        self.inner = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_for(lambda: "http://" in self.log or self.inner.poll() is not None, 120)
        found = re.search(r"http://\S+", self.log)
        assert found, self.log
        self.url = found.group()

    def _read(self) -> None:
        for line in self.inner.stderr:
            self.log += line

    def open_stream(self, tokens: int, **headers: str) -> http.client.HTTPResponse:
        """A stream whose first event has come."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        body = json.dumps({**STREAM, "max_tokens": tokens})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: {")
        return answer

    def end(self) -> int:
        """The exit code after the whole log has been read."""
        code = self.inner.wait(120)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def started(model: Path, *words: str, **options: Any) -> Iterator[Process]:
    process = Process(model, *words, **options)
    try:
        yield process
    finally:
        process.inner.kill()
        process.inner.wait()


def test_what_runs_is_finished_after_sigterm(model):
    with started(model, "--drain-seconds", "100") as server:
        stream = server.open_stream(400)
        server.inner.send_signal(signal.SIGTERM)
        wait_for(lambda: ask(f"{server.url}/health")[0] == 503)
        status, headers, _ = ask(f"{server.url}/v1/completions", {"prompt": "the"})
        assert status == 503
        assert "retry-after" in headers
        events = stream.read().decode()
        assert events.rstrip().endswith("data: [DONE]")
        assert '"finish_reason": "length"' in events
        assert server.end() == 0
    assert "Traceback" not in server.log
    assert "river" not in server.log


def test_late_requests_are_ended_and_the_key_of_the_environment_is_required(model, tmp_path):
    words = ("--drain-seconds", "0", "--served-model-name", "small")
    python = forked_python(tmp_path)
    with started(model, *words, python=python, DMS_API_KEY="secret") as server:
        assert ask(f"{server.url}/v1/models")[0] == 401
        status, _, answer = ask(f"{server.url}/v1/models", Authorization="Bearer secret")
        assert status == 200
        assert answer["data"][0]["id"] == "small"
        stream = server.open_stream(1000, Authorization="Bearer secret")
        server.inner.send_signal(signal.SIGINT)
        events = stream.read().decode()
        assert "the server is shutting down" in events
        assert "[DONE]" not in events
        assert server.end() == 0
    assert "Traceback" not in server.log


def test_a_broken_engine_ends_the_process(model, tmp_path):
    """Five requests fail one after the other; nothing is tried again meanwhile."""
    words = ("--prefill-chunk", "8")
    how = {"module": "tests.support.broken_server", "python": forked_python(tmp_path)}
    with started(model, *words, **how) as server:
        body = {"prompt": [5] * 12, "max_tokens": 2}
        for _ in range(5):
            assert ask(f"{server.url}/health")[0] == 200
            assert ask(f"{server.url}/v1/completions", body)[0] == 500
        assert ask(f"{server.url}/health")[::2] == (503, {"status": "broken"})
        assert ask(f"{server.url}/v1/completions", body)[0] == 503
        assert server.end() == 1
    assert server.log.count("a step of the engine failed") == 5
    (line,) = (line for line in server.log.splitlines() if "the server shuts down - " in line)
    assert "error: 5 steps failed and the engine did no work between them" in line
    assert line.endswith("RuntimeError: a broken kernel")


def test_silent_connections_take_neither_all_descriptors_nor_the_disk(model):
    with started(model, descriptors=128) as server, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        wait_for(lambda: "too many connections" in server.log)
        assert ask(f"{server.url}/v1/completions", {"prompt": "the", "max_tokens": 2})[0] == 200
        server.inner.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert len(server.log.splitlines()) < 50
