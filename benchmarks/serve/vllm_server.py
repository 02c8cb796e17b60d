"""vLLM's HTTP server on a model directory, measured by its own client, `vllm bench serve`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serve.traffic import Lengths

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
SERVE = [*VLLM, "serve"]
BENCH = [*VLLM, "bench", "serve"]
_START_SECONDS = 900
_END_SECONDS = 120


class ServerError(Exception):
    """The server or its client ended with an error."""


class Load(NamedTuple):
    """Requests that the client sends.

    Attributes:
        requests: Number of requests.
        lengths: Tokens of each.
        rate: Requests per second of a Poisson process.
    """

    requests: int
    lengths: Lengths
    rate: float


def measure_server(
    folder: Path, options: Mapping[str, Any], environment: Mapping[str, str], load: Load
) -> dict[str, Any]:
    """Start a server, and measure it with random prompts.

    Args:
        folder: Model directory with a tokenizer.
        options: Arguments of vLLM's engine.
        environment: Variables of the server.
        load: Requests.

    Returns:
        `requests_s` and `tokens_s` of the output, and percentiles in milliseconds of the time to
        the first token (`ttft_ms`) and of the time between tokens (`itl_ms`).

    Raises:
        ServerError: The server or its client ended with an error.
    """
    port = _free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with _server([*SERVE, str(folder), *address, *words(options)], environment, port):
        found = _client(folder, load, port)
    if found["completed"] != load.requests:
        raise ServerError(f"{found['completed']} of {load.requests} requests were answered")
    return {
        "rate": load.rate,
        "requests_s": round(found["request_throughput"], 3),
        "tokens_s": round(found["output_throughput"]),
        **{
            f"{name}_ms": {f"p{n}": round(found[f"p{n}_{name}_ms"], 2) for n in (50, 99)}
            for name in ("ttft", "itl")
        },
    }


def words(options: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's engine as options of its command line."""
    given: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{option}" if value else f"--no-{option}")
        else:
            given += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return given


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def _server(command: list[str], environment: Mapping[str, str], port: int) -> Iterator[None]:
    """Run a server in the background; its output goes to stderr."""
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        _wait_until_healthy(process, port)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # it would keep the memory of the next server
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"vllm serve ended with exit code {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise ServerError(f"vllm serve was not ready within {_START_SECONDS} s")


def _client(folder: Path, load: Load, port: int) -> dict[str, Any]:
    """Run `vllm bench serve`; return its result."""
    with tempfile.TemporaryDirectory() as results:
        options = {
            "backend": "openai",
            "base_url": f"http://127.0.0.1:{port}",
            "model": folder,
            "dataset_name": "random",
            "random_input_len": load.lengths.prompt,
            "random_output_len": load.lengths.new,
            "num_prompts": load.requests,
            "request_rate": load.rate,
            "ignore_eos": True,
            "temperature": 0,
            "disable_tqdm": True,
            "percentile_metrics": "ttft,itl",
            "metric_percentiles": "50,99",
            "save_result": True,
            "result_dir": results,
            "result_filename": "result.json",
        }
        command = [*BENCH, *words(options)]
        ended = subprocess.run(command, stdout=sys.stderr, check=False)
        if ended.returncode:
            raise ServerError(f"vllm bench serve ended with exit code {ended.returncode}")
        found: dict[str, Any] = json.loads((Path(results) / "result.json").read_text())
        return found
