"""A Hugging Face hub on this machine that holds one data set: what `datasets` asks to stream it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "owner/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The data set and what was asked for.

    Attributes:
        endpoint: Its address.
        files: Content by path; one folder below the top.
        requests: Method and path of every request.
        lost: Files that are listed and cannot be read.
    """

    endpoint: str
    files: dict[str, bytes]
    requests: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    def environment(self, home: str) -> dict[str, str]:
        """Variables for a process that takes this for the hub, and a folder for its cache."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}

    def description(self, path: str) -> Any:
        """The API's answer to a GET; None for what is not there."""
        if re.fullmatch(rf"/api/datasets/{NAME}(/revision/(main|{COMMIT}))?", path):
            return {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]}
        tree = re.fullmatch(rf"/api/datasets/{NAME}/tree/{COMMIT}(?:/(\w+))?", path)
        if tree is None:
            return None
        if tree[1] is None:
            folders = {name.partition("/")[0] for name in self.files}
            return [{"type": "directory", "path": name, "oid": COMMIT} for name in folders]
        found = [name for name in self.files if name.startswith(f"{tree[1]}/")]
        return [
            {"type": "file", "path": name, "size": len(self.files[name]), "oid": self.tag(name)}
            for name in found
        ]

    def tag(self, name: str) -> str:
        """Return the tag that identifies the content of a file."""
        return hashlib.sha1(self.files[name]).hexdigest()


@contextmanager
def dataset_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """A server that ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            name = path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/")
            if name in hub.files.keys() - hub.lost:
                return self._file(name)
            found = hub.description(path)
            if found is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        do_HEAD = do_GET  # noqa: N815

        def _file(self, name: str) -> None:
            content = hub.files[name]
            about = {"ETag": f'"{hub.tag(name)}"', "X-Repo-Commit": COMMIT}
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if part is None:
                return self._send(200, content, about)
            first, last = int(part[1]), min(int(part[2]), len(content) - 1)
            about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._send(206, content[first : last + 1], about)

        def _send(self, status: int, content: bytes, about: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in about.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(endpoint=f"http://127.0.0.1:{server.server_port}", files=files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
