"""metrics.jsonl as the durable record; Weights & Biases as a view that may fail."""

from __future__ import annotations

import builtins
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from PIL import Image

from dms_train.observe import sinks
from dms_train.observe.options import ObserveOptions
from dms_train.observe.sinks import JsonlSink, WandbSink, open_sinks, reachable, wandb_run_id
from tests.support import wandb_file, wandb_server
from tests.support.disks import CannotArrange, small_disk

KEY = "0123456789abcdef" * 2 + "deadbeef"


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "run")
    sink.log(1, {"train/loss": 0.5})
    assert rows(tmp_path / "run") == [{"step": 1, "train/loss": 0.5}]
    sink.close()


def test_numbers_json_cannot_hold_become_null(tmp_path):
    JsonlSink(tmp_path).log(1, {"a": float("nan"), "b": float("inf"), "c": 1})
    assert rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1}]


def test_resuming_drops_rows_past_the_step_and_a_cut_off_one(tmp_path):
    sink = JsonlSink(tmp_path)
    for step in range(1, 6):
        sink.log(step, {"x": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "x"')
    resumed = JsonlSink(tmp_path, resume_step=3)
    resumed.log(4, {"x": 40})
    assert [(row["step"], row["x"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_starting_over_drops_an_earlier_attempt(tmp_path):
    JsonlSink(tmp_path).log(1, {})
    JsonlSink(tmp_path)
    assert rows(tmp_path) == []


def test_summary_adds_up(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.summary({"a": 1})
    sink.summary({"b": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1, "b": None}


def test_run_id_belongs_to_the_run_folder(tmp_path):
    first = wandb_run_id(tmp_path, resumed=False)
    assert wandb_run_id(tmp_path, resumed=True) == first
    assert wandb_run_id(tmp_path, resumed=False) != first


def test_disabled_opens_no_wandb(tmp_path):
    opened = open_sinks(
        ObserveOptions(wandb="disabled"), tmp_path, {}, resume_step=0, warn=pytest.fail
    )
    assert [type(sink) for sink in opened] == [JsonlSink]
    assert not (tmp_path / "wandb_id").exists()


def test_without_wandb_there_is_one_warning(tmp_path, monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError("No module named 'wandb'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    warnings: list[str] = []
    sink = WandbSink(ObserveOptions(), tmp_path, {}, run_id="a", warn=warnings.append)
    sink.log(1, {"x": 1})
    sink.summary({"x": 1})
    sink.close()
    assert warnings == ["wandb: ImportError: No module named 'wandb'; no longer recorded there"]


class BrokenRun:
    """A run whose server went away; it finishes on request."""

    def __init__(self):
        self.answers = threading.Event()

    def log(self, *args, **kwargs):
        raise OSError("gone\nfor good")

    def finish(self):
        self.answers.wait()


def broken_sink(run: object, warnings: list[str]) -> WandbSink:
    sink = WandbSink.__new__(WandbSink)
    sink._warn, sink._run, sink._wandb = warnings.append, run, None
    return sink


def test_failures_do_not_stop_training():
    warnings: list[str] = []
    sink = broken_sink(BrokenRun(), warnings)
    sink.log(1, {})
    sink.log(2, {})
    sink.close()
    assert warnings == ["wandb: OSError: gone for good; no longer recorded there"]


def test_closing_waits_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(sinks, "_FINISH_SECONDS", 0.05)
    warnings: list[str] = []
    run = BrokenRun()
    broken_sink(run, warnings).close()  # the test's time limit is the bound
    run.answers.set()
    assert "did not finish in time" in warnings[0]


def test_reachable(monkeypatch):
    monkeypatch.setattr(sinks.urllib.request, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}")
    assert not reachable(f"http://127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        monkeypatch.setattr(sinks.urllib.request, "getproxies", lambda: {"https": address})
        monkeypatch.setattr(sinks.urllib.request, "proxy_bypass", lambda host: False)
        assert reachable("https://api.example.invalid")


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    module = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield module
    module.teardown()


def record(run_dir: Path, resume_step: int, steps: range, **options) -> list[str]:
    warnings: list[str] = []
    opened = open_sinks(
        ObserveOptions(**options),
        run_dir,
        {"optim": {"lr": 1e-4}},
        resume_step=resume_step,
        warn=warnings.append,
    )
    for step in steps:
        for sink in opened:
            sink.log(step, {"train/loss": 1 / step})
    for sink in opened:
        sink.summary({"final/cr": 2.0})
        sink.close()
    return warnings


def test_offline_run_read_back(wandb, tmp_path):
    run_dir = tmp_path / "outputs" / "mine"
    assert record(run_dir, 0, range(1, 5)) == []
    (path,) = wandb_file.find(run_dir)
    run = wandb_file.read(path)
    assert run.name == "mine"
    assert run.run_id == (run_dir / "wandb_id").read_text().strip()
    assert [(r["step"], r["train/loss"]) for r in run.rows] == [(s, 1 / s) for s in range(1, 5)]
    assert run.config["optim"] == {"lr": 1e-4}
    assert run.summary["final/cr"] == 2.0
    axes = {
        "train/*": "step",
        "branch/*": "step",
        "early_stop/*": "step",
        "validate_export/*": "step",
        "run_tasks/*": "step",
        "eval/*": "tokens",
    }
    assert run.step_metrics == {"step": "", "tokens": "", **axes}
    assert all(KEY.encode() not in f.read_bytes() for f in run_dir.rglob("*") if f.is_file())


def test_the_names_of_a_run_read_back(wandb, tmp_path):
    record(tmp_path, 0, range(1, 2), project="some-project", entity="some-team", name="some-run")
    run = wandb_file.read(*wandb_file.find(tmp_path))
    assert (run.project, run.entity, run.name) == ("some-project", "some-team", "some-run")


KEPT = ((1.0, 0.25), (0.5, 0.75), (0.125, 0.3))


def test_tables_by_head_and_validations_read_back(wandb, tmp_path):
    sink = WandbSink(ObserveOptions(), tmp_path, {}, run_id="a", warn=pytest.fail)
    sink.log(1, {"tokens": 64, "eval/kl": 0.5, "eval/kept": KEPT})
    evaluated = {"validate_export/cr_factor": 2.5, "validate_export/student.accuracy": 0.96}
    sink.log(2, {"tokens": 128, **evaluated})
    sink.close()
    (path,) = wandb_file.find(tmp_path)
    first, second = wandb_file.read(path).rows
    assert (first["step"], first["tokens"], first["eval/kl"]) == (1, 64, 0.5)
    assert sum(first["eval/kept_histogram.values"]) == 6
    bins = first["eval/kept_histogram.bins"]
    assert (bins[0], bins[-1]) == (0.125, 1.0)
    picture = Image.open(path.parent / "files" / first["eval/kept.path"]).convert("L")
    levels = numpy.asarray(picture)[6::12, 6::12] / 255
    numpy.testing.assert_allclose(levels, KEPT, atol=1 / 255)
    assert second["validate_export/cr_factor"] == 2.5
    table = json.loads((path.parent / "files" / second["validate_export/table.path"]).read_text())
    assert table["columns"] == ["metric", "value"]
    assert table["data"] == [["cr_factor", 2.5], ["student.accuracy", 0.96]]


def test_names_are_those_of_metrics_jsonl(wandb, tmp_path):
    opened = open_sinks(ObserveOptions(), tmp_path, {}, resume_step=0, warn=pytest.fail)
    logged = [
        {"tokens": 64, "train/kl": 0.5, "train/cr": 1.5, "train/mfu": 0.25},
        {"tokens": 128, "eval/kl": 0.25, "eval/kept": KEPT},
        {"tokens": 192, "validate_export/cr_factor": 2.5},
    ]
    for step, values in enumerate(logged, 1):
        for sink in opened:
            sink.log(step, values)
    for sink in opened:
        sink.close()
    (path,) = wandb_file.find(tmp_path)
    for mine, theirs in zip(rows(tmp_path), wandb_file.read(path).rows, strict=True):
        numbers = {k: v for k, v in mine.items() if k != "eval/kept"}
        assert {k: theirs[k] for k in numbers} == numbers
        assert ("eval/kept" in mine) == ("eval/kept.path" in theirs)


def test_passwords_are_removed_from_addresses():
    text = sinks._public("https://me:secret@host:8/x http://host/y@z")
    assert text == "https://host:8/x http://host/y@z"


def test_resumed_offline_run_keeps_its_id_and_steps(wandb, tmp_path):
    record(tmp_path, 0, range(1, 5))
    record(tmp_path, 3, range(4, 7))
    segments = [wandb_file.read(path) for path in wandb_file.find(tmp_path)]
    assert len({segment.run_id for segment in segments}) == 1
    assert [row["_step"] for row in segments[-1].rows] == [4, 5, 6]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_online_without_a_server_records_offline(wandb, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", url)
    warnings = record(tmp_path, 0, range(1, 3), wandb="online")
    assert warnings == [f"wandb: {url} cannot be reached; recording offline"]
    (path,) = wandb_file.find(tmp_path)
    assert len(wandb_file.read(path).rows) == 2
    assert all(KEY.encode() not in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())


def test_online_without_a_key_prompts_for_nothing(wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        (warning,) = record(tmp_path, 0, range(1, 3), wandb="online")
    assert "no API key" in warning
    assert len(wandb_file.find(tmp_path)) == 1


@contextlib.contextmanager
def server(status: int) -> Iterator[tuple[str, list[str]]]:
    """Answers every request with a status; its address, and the paths that were requested."""
    requested: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requested.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as opened:
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{opened.server_port}", requested
        opened.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_refuses_leaves_an_offline_run(wandb, tmp_path, monkeypatch, status):
    with server(status) as (url, requested):
        monkeypatch.setenv("WANDB_BASE_URL", url)
        warnings = record(tmp_path, 0, range(1, 3), wandb="online")
    assert "/graphql" in requested
    assert warnings[-1].endswith("recording offline"), warnings
    assert KEY not in "".join(warnings)
    assert len(wandb_file.read(wandb_file.find(tmp_path)[-1]).rows) == 2
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert all(KEY.encode() not in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())


@pytest.mark.slow
def test_a_server_that_never_answers_delays_nothing(wandb, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        (warning,) = record(tmp_path, 0, range(1, 3), wandb="online")
    assert warning.endswith("recording offline")
    assert KEY not in warning
    assert len(wandb_file.read(wandb_file.find(tmp_path)[-1]).rows) == 2


def uploaded(received: wandb_server.Received, run_dir: Path) -> list[tuple[int, float]]:
    """Steps and losses of the only run that the server got."""
    assert list(received.rows) == [(run_dir / "wandb_id").read_text().strip()]
    found = received.rows[next(iter(received.rows))].values()
    return sorted((row["step"], row["train/loss"]) for row in found if "train/loss" in row)


@pytest.mark.slow
def test_an_online_run_arrives_at_a_server(wandb, tmp_path, monkeypatch):
    with wandb_server.serve() as received:
        monkeypatch.setenv("WANDB_BASE_URL", received.url)
        assert record(tmp_path, 0, range(1, 5), wandb="online") == []
    assert uploaded(received, tmp_path) == [(step, 1 / step) for step in range(1, 5)]
    assert not any(KEY.encode() in body for body in received.bodies)


@pytest.mark.slow
def test_offline_segments_are_synchronized_as_one_run(wandb, tmp_path, monkeypatch):
    record(tmp_path, 0, range(1, 5))
    record(tmp_path, 3, range(4, 7))
    segments = [str(path.parent) for path in wandb_file.find(tmp_path)]
    assert len(segments) == 2
    with wandb_server.serve() as received:
        environment = {**os.environ, "WANDB_BASE_URL": received.url, "WANDB_API_KEY": KEY}
        command = [sys.executable, "-m", "wandb", "sync", *segments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert uploaded(received, tmp_path) == [(step, 1 / step) for step in range(1, 7)]
    assert {"config.yaml", "wandb-summary.json"} <= received.files
    assert not any(KEY.encode() in body for body in received.bodies)


def test_rows_wait_for_space_on_a_full_disk(tmp_path):
    warnings = []
    try:
        with small_disk(tmp_path / "disk", 32) as disk:
            sink = JsonlSink(disk, warn=warnings.append)
            for step in range(1, 30):
                sink.log(step, {"text": "x" * 2000})
            sink.summary({"text": "x" * 2000})
            assert len(warnings) == 1
            assert "No space left on device; its rows wait for free space" in warnings[0]
            workspace = ["mount", "-o", "remount,size=256k", str(disk)]
            subprocess.run(workspace, check=True)
            sink.log(30, {"text": "last"})
            assert [row["step"] for row in rows(disk)] == list(range(1, 31))
            sink.close()
            assert len(warnings) == 1
    except CannotArrange as reason:
        pytest.skip(str(reason))


def test_rows_that_could_not_be_written_are_reported(tmp_path):
    warnings = []
    try:
        with small_disk(tmp_path / "disk", 8) as disk:
            sink = JsonlSink(disk, warn=warnings.append)
            sink.log(1, {"text": "x" * 20000})
            sink.close()
    except CannotArrange as reason:
        pytest.skip(str(reason))
    assert "its last rows could not be written" in warnings[-1]
