"""Chains from a server with OpenAI's API: those of the engine, and one line for what fails."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dms_train.cli import evaluate as command
from dms_train.cli.config_source import compose_evaluation
from dms_train.evaluation.analysis.comparison import Comparison
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling import results, store
from dms_train.evaluation.scaling.run import evaluate, prepare
from tests.support import refusals, served_model
from tests.support.served_model import Running

KEY, SHEETS, NEW = "a key", 5, 12
COSTS = ("kv_reads", "peak", "joint_peak", "joint_peak_shared", "prefill_reads", "peak_bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with served_model.serving(model, engine={"max_num_seqs": 8}, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def words(server: Running, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sheets of different lengths, of which every second one ends at a text of its answer."""
    path = tmp_path_factory.mktemp("sheets") / "sheets.jsonl"
    rows = []
    for n in range(SHEETS):
        prompt = f"{'x' * 40 * n} {n}: Solution"
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
        answer = server.ask("/v1/completions", body, Authorization=f"Bearer {KEY}")[2]
        text = answer["choices"][0]["text"]
        stop = "never said" if n % 2 else text[len(text) // 2]
        rows.append({"prompt": prompt, "answers": ["1"], "stop": stop})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model.path={model}", f"task.path={path}", f"sweep.lengths=[{NEW / 1024}]"]
    return [*given, "sweep.widths=[1,2]"]


def run(words: list[str], folder: Path, *more: str) -> results.RunResult:
    options = compose_evaluation([*words, f"run.dir={folder}", *more])
    return evaluate(prepare(options), lambda line: None, key=KEY)


def rows(folder: Path) -> list[dict[str, Any]]:
    left_out = ("session", "clock", "seconds", "peak_allocated_bytes", *COSTS)
    found = store.read_chains(folder)
    return [{k: v for k, v in row.items() if k not in left_out} for row in found]


def test_greedy_chains_are_those_of_the_engine(
    server: Running, words: list[str], tmp_path: Path
) -> None:
    greedy = [*words, "sampling.temperature=0"]
    ours = run(greedy, tmp_path / "ours", "model.device=cpu")
    served = run(greedy, tmp_path / "served", f"model.server={server.url}/v1/")
    assert rows(tmp_path / "served") == rows(tmp_path / "ours")
    assert {row["finish_reason"] for row in rows(tmp_path / "served")} == {"stop", "length"}
    for row in store.read_chains(tmp_path / "served"):
        assert {row[name] for name in ("prefill_reads", "peak_bytes")} == {None}
        assert row["kv_reads"] == row["joint_peak"] == [None]
    for one, other in zip(ours.points(), served.points(), strict=True):
        assert (one.accuracy, one.tokens, one.truncated) == (
            other.accuracy,
            other.tokens,
            other.truncated,
        )
        assert "KV reads" in str(one)
        assert "nan" not in str(other)
    points = json.loads((tmp_path / "served" / "summary.json").read_text())["points"]
    assert {point["kv_reads"] for point in points} == {None}
    with pytest.raises(EvaluationError, match="costs are unknown; leave it out"):
        Comparison([served])


def test_sampled_chains_have_seeds_of_their_own(
    server: Running, words: list[str], tmp_path: Path
) -> None:
    sampled = [*words, "sampling.temperature=1", f"model.server={server.url}/v1"]
    run(sampled, tmp_path / "first", "model.max_num_seqs=1")
    run(sampled, tmp_path / "again")
    assert rows(tmp_path / "first") == rows(tmp_path / "again")
    texts = [row["text"] for row in rows(tmp_path / "first")]
    assert texts[::2] != texts[1::2]
    run(sampled, tmp_path / "other", "sampling.seed=1")
    assert [row["text"] for row in rows(tmp_path / "other")] != texts


def test_documents_before_an_error_are_kept_and_the_run_continues(
    server: Running, words: list[str], tmp_path: Path
) -> None:
    """A proxy fails at the fourth document, of which each has one chain."""
    asked: list[int] = []

    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is not None:
            asked.append(len(body["prompt"]))
            if len(asked) == 4:
                return 500, {"error": {"message": "out of\norder"}}
        status, _, content = server.ask(
            path, None if body is None else body, Authorization=f"Bearer {KEY}"
        )
        return status, content

    one = [*words, "sweep.widths=[1]", "sampling.temperature=0", "model.max_num_seqs=1"]
    with listening(answer) as url:
        with pytest.raises(EvaluationError, match=r"/completions: 500 out of order$"):
            run(one, tmp_path / "run", f"model.server={url}/v1")
        assert len(rows(tmp_path / "run")) == 3
        run(one, tmp_path / "run", f"model.server={url}/v1")
    run(one, tmp_path / "whole", f"model.server={server.url}/v1")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert len(asked) >= SHEETS + 1


def test_what_a_server_does_not_say_is_one_line(
    words: list[str], model: Path, tmp_path: Path
) -> None:
    def refused(listed: Any, match: str) -> None:
        with (
            listening(lambda path, body: (200, listed)) as url,
            pytest.raises(EvaluationError, match=match),
        ):
            run(words, tmp_path / "run", f"model.server={url}/v1")

    refused({"data": []}, "lists no model")
    for listed in ({}, {"data": [{}]}, [1], {"data": [{"id": "m"}]}):
        refused(listed, r"not an answer of OpenAI's API; correct model\.server")
    other = re.escape(f"serves {tmp_path}; correct model.path or model.server")
    for listed in ({"id": str(tmp_path)}, {"id": "m", "root": str(tmp_path)}):
        refused({"data": [listed]}, other)
    known = {"id": str(tmp_path), "root": str(model), "max_model_len": 100}
    refused({"data": [known]}, "takes 100 with the answer")
    short = {"data": [{"id": "m", "max_model_len": 100}]}
    refused(short, r"prompt has \d+ tokens, and http.* takes 100 with the answer")
    with pytest.raises(EvaluationError, match=r"no answer .*correct model\.server"):
        run(words, tmp_path / "run", "model.server=http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("model.server=127.0.0.1:8000", "model.server=127.0.0.1:8000: use http://HOST:PORT/v1"),
        ("model.dtype=float32", "model.dtype: the server decides it; leave it out"),
        ("model.cache_dtype=fp8", "model.cache_dtype: the server decides it; leave it out"),
        ("policy=h2o", "policy: the server decides it; leave it out with model.server"),
    ],
)
def test_settings_that_a_server_decides_are_refused(
    words: list[str], tmp_path: Path, given: str, line: str
) -> None:
    server = [] if "server" in given else ["model.server=http://127.0.0.1:9/v1"]
    found = refusals.run_here(["eval", *words, f"run.dir={tmp_path / 'run'}", *server, given])
    assert found.code == 2
    assert line in found.stderr
    assert not (tmp_path / "run").exists()


def test_the_key_of_the_environment_is_sent(
    server: Running,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [*words, "sampling.temperature=0", f"model.server={server.url}/v1"]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert command.main([*given, f"run.dir={tmp_path / 'with'}"]) == 0
    monkeypatch.delenv("OPENAI_API_KEY")
    assert command.main([*given, f"run.dir={tmp_path / 'without'}"]) == 2
    assert "401 the API key is missing or wrong" in capsys.readouterr().err


class listening:  # noqa: N801 (a context manager, read as a verb)
    """A server on a free port whose answers are those of a function of path and body."""

    def __init__(self, answer: Callable[[str, dict[str, Any] | None], tuple[int, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                self._reply(json.loads(self.rfile.read(size)))

            def _reply(self, body: dict[str, Any] | None) -> None:
                status, content = answer(self.path, body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()
