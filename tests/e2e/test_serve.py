"""`dms-serve` as a process: its start, its end after a signal, and the page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import served_model
from tests.support.served_model import ask, wait_for

pytestmark = pytest.mark.timeout(300)
STREAM = {"prompt": "the river", "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.write_model(tmp_path_factory.mktemp("served"))


class Process:
    """A server in a process of its own and what it writes to stderr."""

    def __init__(self, model: Path, *words: str, **environment: str) -> None:
        command = (sys.executable, "-m", "dms_train.cli.serve", str(model), "--port", "0", *words)
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
def started(model: Path, *words: str, **environment: str) -> Iterator[Process]:
    process = Process(model, *words, **environment)
    try:
        yield process
    finally:
        process.inner.kill()
        process.inner.wait()


def test_what_runs_is_finished_after_sigterm(model):
    with started(model, "--drain-seconds", "100") as server:
        stream = server.open_stream(1000)
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


def test_late_requests_are_ended_and_the_key_of_the_environment_is_required(model):
    words = ("--drain-seconds", "0", "--served-model-name", "small")
    with started(model, *words, DMS_API_KEY="secret") as server:
        assert ask(f"{server.url}/v1/models")[0] == 401
        status, _, answer = ask(f"{server.url}/v1/models", Authorization="Bearer secret")
        assert status == 200
        assert answer["data"][0]["id"] == "small"
        stream = server.open_stream(1000, Authorization="Bearer secret")
        server.inner.send_signal(signal.SIGINT)
        events = stream.read().decode()
        assert "the server stops" in events
        assert "[DONE]" not in events
        assert server.end() == 0
    assert "Traceback" not in server.log
