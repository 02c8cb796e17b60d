"""A stand-in for the server of Weights & Biases that accepts every request and records it.

It implements the few requests that wandb makes to open a run, stream its rows and upload its files.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Received:
    """Requests that came in, by run.

    Attributes:
        url: Address of the server.
        rows: Rows of each run id by step; a later row of a step replaces the earlier one.
        files: Names of uploaded files of all runs.
        bodies: Every request's body.
    """

    url: str = ""
    rows: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def serve() -> Iterator[Received]:
    """Run the server on a free port of this machine."""
    received = Received()

    class Handler(_Handler):
        keeps = received

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received
        server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    keeps: Received

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.keeps.bodies.append(body)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            answer = {"data": self._data(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            self._stream(self.path.split("/")[-2], json.loads(body))
        elif self.path.startswith("/upload/"):
            self.keeps.files.add(self.path.removeprefix("/upload/"))
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *words: object) -> None:
        """Log nothing."""

    def _data(self, request: dict[str, Any]) -> dict[str, Any]:
        query, given = request["query"], request.get("variables", {})
        if "upsertBucket" in query:
            project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given.get("name"), "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            names = given["files"]
            files = [{"name": n, "uploadUrl": f"{self.keeps.url}/upload/{n}"} for n in names]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}
        return {"model": {"bucket": None}}

    def _stream(self, run: str, sent: dict[str, Any]) -> None:
        history = sent.get("files", {}).get("wandb-history.jsonl", {})
        rows = map(json.loads, history.get("content", []))
        self.keeps.rows.setdefault(run, {}).update({row["_step"]: row for row in rows})
