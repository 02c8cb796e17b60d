"""A Hugging Face hub on this machine: records what is uploaded."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """A hub that records its requests.

    Attributes:
        endpoint: Its address.
        token: The only one it accepts.
        created: Bodies of the requests that create a repository.
        files: Content of committed files by path.
    """

    endpoint: str
    token: str
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The API's answer to a POST."""
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            name = f"someone/{self.created[-1]['name']}"
            return {"url": f"{self.endpoint}/{name}", "name": name, "id": "1"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [_plain(name) for name in names]}
        assert path.endswith("/commit/main"), path
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.files[value["path"]] = base64.b64decode(value["content"])
        return {"commitUrl": f"{self.endpoint}/someone/x/commit/{'0' * 40}", "commitOid": "0" * 40}


def _plain(name: str) -> dict[str, Any]:
    return {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None}


@contextmanager
def hub_server(token: str) -> Iterator[Hub]:
    """A server that ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            if self.headers.get("Authorization") != f"Bearer {token}":
                return self._send(401, {"error": "Invalid credentials"})
            return self._send(200, hub.answer(self.path.partition("?")[0], body))

        def do_GET(self) -> None:
            self._send(200, {"siblings": [], "sha": "0" * 40, "id": "someone/x"})

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(endpoint=f"http://127.0.0.1:{server.server_port}", token=token)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
