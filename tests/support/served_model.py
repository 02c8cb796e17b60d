"""A tiny DMS export with a byte-level tokenizer and a chat template, and a server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import torch

from dms_train.export.writer import write_export
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions
from dms_train.method.spec import PRESETS
from dms_train.server.options import ServerOptions
from dms_train.server.run import Server, bound_socket, describe
from tests.support import hub_model
from tests.unit.inference.conftest import tiny_architecture, varied_weights

NAME = "tiny"
VOCABULARY = 512  # of the model; the tokenizer has fewer
LONGEST = 1024
# refuses an assistant that speaks first; the thinking mode is Qwen3's
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def write_model(folder: Path, *, chat: bool = True) -> Path:
    """An export that evicts about half of its tokens, with a window of 8."""
    source = folder / "source"
    hub_model.write_model(source)
    if chat:
        file = source / "tokenizer_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    a = replace(tiny_architecture("llama"), vocab_size=VOCABULARY)
    write_export(
        folder / "export",
        architecture=a,
        spec=PRESETS["dms"].override(window=8),
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms",
        weights=varied_weights(a, 0).items(),
        source_dir=source,
        selftest=None,
        provenance={},
    )
    return folder / "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers.

    Attributes:
        url: Without a path.
        engine: Its engine; look at it only while it has nothing to do.
        server: The server.
    """

    url: str
    engine: InferenceEngine
    server: Server

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client for it."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def ask(
        self, path: str, body: bytes | dict | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case and decoded JSON or text of an answer."""
        return ask(self.url + path, body, **headers)

    def gauge(self, name: str) -> float:
        """A number of `/metrics`."""
        text = self.ask("/metrics")[2]
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def wait_until_idle(self) -> None:
        """Return when no sequence runs or waits and the engine has seen it."""
        wait_for(lambda: self.server.admission.inside == 0)
        wait_for(lambda: not self.engine.has_unfinished_requests())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step of the engine starts inside."""
        halted, resume = threading.Event(), threading.Event()

        def hold() -> None:
            halted.set()
            resume.wait(120)

        self.server._thread._calls.put(hold)
        assert halted.wait(60)
        try:
            yield
        finally:
            resume.set()


def ask(
    url: str, body: bytes | dict | None = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case and decoded JSON or text of an answer."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, named)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return _read(answer)
    except urllib.error.HTTPError as error:
        with error:
            return _read(error)


def _read(answer: Any) -> tuple[int, dict[str, str], Any]:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    text = answer.read().decode()
    is_json = headers.get("content-type") == "application/json"
    return answer.status, headers, json.loads(text) if is_json else text


def wait_for(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return when `done` does; an error after the time."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    model: Path, *, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[Running]:
    """A server on a free port, in a thread of its own."""
    made = InferenceEngine(model, EngineOptions(**(engine or {})))
    chosen = ServerOptions(port=0, **options)
    served = describe(made, model, NAME)
    ready: list[tuple[Server, asyncio.AbstractEventLoop]] = []
    with bound_socket(chosen) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"

        async def run() -> None:
            server = Server(made, served, chosen)
            ready.append((server, asyncio.get_running_loop()))
            await server.run(sock)

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        wait_for(lambda: bool(ready) and _answers(url))
        server, loop = ready[0]
        yield Running(url=url, engine=made, server=server)
        loop.call_soon_threadsafe(server.stop)
        thread.join(60)
        assert not thread.is_alive()


def _answers(url: str) -> bool:
    try:
        return ask(f"{url}/health")[0] == 200
    except OSError:
        return False
