"""The benchmark's vLLM server: a stand-in that does not end when it is asked to."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from benchmarks.serve import vllm_server

STUBBORN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_END_SECONDS", 0.2)
    port = vllm_server._free_port()
    command = [sys.executable, "-c", STUBBORN, str(port)]
    with vllm_server._server(command, os.environ, port):
        children = psutil.Process().children()
        (server,) = [child for child in children if str(port) in child.cmdline()]
    assert not psutil.pid_exists(server.pid)
