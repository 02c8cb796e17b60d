"""The benchmark of the engine on a CPU: its numbers of the cache, and refused options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.serve import main as serve
from benchmarks.serve import ours, peer, throughput
from benchmarks.serve.case import Case, measure
from benchmarks.serve.models import MEMORY, WINDOW, random_model
from benchmarks.timing import device_name
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions

NEW = 9
OPTIONS = ("--device", "cpu", "--new-tokens", str(NEW))
MODES = ("default", "graphs for decoding")
ROOT = Path(__file__).resolve().parents[3]


def test_every_way_is_measured_and_decisions_evict(tmp_path: Path) -> None:
    words = ["serve", "small", *OPTIONS, "--output", str(tmp_path)]
    assert main(words) == 0
    (file,) = tmp_path.glob("*/serve.json")
    cases = json.loads(file.read_text())["cases"]
    found = {(case["engine"], case["sequences"]): case for case in cases}
    assert set(found) == {(name, n) for name in ("DMS", "dense") for n in (1, 3)}
    for (name, _), case in found.items():
        computed = case["context"] + NEW
        behind = computed - WINDOW - 1
        if name == "dense":
            assert case["live"] == computed
        else:
            assert 0 < case["live"] - WINDOW - 1 < 2 * serve.KEPT * behind
        low, high = case["step_ms_spread"]
        assert 0 < low <= case["step_ms"] <= high


PEER_PROGRAM = """#!/bin/sh
grep -q '"dense"' "$FILE" || exit 9  # rows of ours are there already
case "$*" in *fp8) echo "$ROW" ;; esac
exit 3
"""
PEER_ROW = {
    "engine": "vLLM 9",
    "mode": "default",
    "cache_dtype": "fp8",
    "shape": "small",
    "sequences": 1,
    "context": 600,
    "prefill_tok_s": 5,
    "step_ms": 2.0,
    "step_ms_spread": [1.0, 3.0],
}


@pytest.mark.slow
def test_what_is_measured_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer fails after its first case; a later run replaces only what it measures again."""
    program = tmp_path / "peer"
    program.write_text(PEER_PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("ROW", json.dumps(PEER_ROW))
    file = tmp_path / f"{device_name(torch.device('cpu')).lower().replace(' ', '_')}" / "serve.json"
    monkeypatch.setenv("FILE", str(file))
    file.parent.mkdir()
    replaced = {**PEER_ROW, "engine": "vLLM 8"}
    kept = {**replaced, "context": 8}
    file.write_text(json.dumps({"cases": [kept, replaced]}))
    words = ["serve", "small", *OPTIONS, "--output", str(tmp_path)]
    assert main([*words, "--peer", str(program)]) == 1
    cases = json.loads(file.read_text())["cases"]
    assert kept in cases
    assert replaced not in cases
    peers = [case for case in cases if case["engine"].startswith("vLLM") and case != kept]
    measured = [case for case in peers if "step_ms" in case]
    assert [case["engine"] for case in measured] == ["vLLM 9"]
    assert all({"commit", "date"} <= set(case) for case in cases if case != kept)
    failed = {(case["mode"], case["cache_dtype"], case["sequences"]) for case in peers}
    assert failed == {(m, d, n) for m in MODES for d in ("fp8", "auto") for n in (1, 3)}
    assert all("exit code 3" in case["failed"] for case in peers if case not in measured)
    assert "failed" in serve.tables({"cases": cases})


def test_sequences_that_do_not_fit_together_have_the_reason_in_their_row() -> None:
    """A cache of half of what three sequences need: they decode, but never all at once."""
    model = random_model("small", 1.0, torch.device("cpu"), torch.float32)
    options = EngineOptions(
        device="cpu", policy="keep_all", max_num_seqs=3, max_model_len=700, cache_bytes=2**20,
        slab_pages=8, prefill_chunk=512,
    )  # fmt: skip
    row = measure(InferenceEngine(model, options), Case(3, 600), NEW)
    assert row["skipped"] == "the KV cache holds 1 of 3 sequences at once"
    assert "step_ms" not in row
    shown = serve.tables({"cases": [{"engine": "dense", "shape": "small", **row}]})
    assert row["skipped"] in shown
    assert "does not fit" in shown


def test_a_gpu_without_memory_for_a_cache_gives_rows_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise InferenceError("gpu_memory_utilization=0.9: leaves 0 bytes for the cache")

    monkeypatch.setattr(ours, "start", refuse)
    args = argparse.Namespace(way="dense", shape="small", cases=[Case(1, 8), Case(2, 8)])
    args.device, args.new_tokens = "cpu", NEW
    rows = list(ours.rows(args))
    assert [row["sequences"] for row in rows] == [1, 2]
    assert all("leaves 0 bytes" in row["skipped"] for row in rows)


def test_both_engines_get_the_same_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    vllm = SimpleNamespace(LLM=lambda **words: given.update(words))
    peer.start(vllm, "small", "fp8", 3, True)
    assert given["kv_cache_dtype"] == "fp8"
    monkeypatch.setattr(ours, "InferenceEngine", lambda _, options: options)
    options = ours.start("dense", "small", [Case(3, 8)], torch.device("cpu"))
    assert options.gpu_memory_utilization == given["gpu_memory_utilization"] == MEMORY
    assert (options.max_num_seqs, options.max_model_len) == (3, given["max_model_len"])
    assert given["max_num_seqs"] == 3


@pytest.mark.slow
def test_many_sequences_forks_and_chains_are_measured(tmp_path: Path) -> None:
    assert main(["serve", "throughput", "--device", "cpu", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/throughput.json")
    record = json.loads(file.read_text())
    dense, dms = record["memory"]
    assert dms["sequences"] > dense["sequences"] > 0
    assert dms["preemptions"] == dense["preemptions"] == 0
    one, many = record["fork"]
    assert one["bytes_after_fork"] < many["bytes_after_fork"] < 2 * one["bytes_after_fork"]
    assert 20 * 2 <= record["chains"]["tokens"] <= 20 * 20
    requests = record["requests"]
    assert requests["equal"] == requests["requests"] == 12
    assert requests["preemptions"] > 0
    assert requests["bytes_left_behind"] == 0


def test_the_gap_is_that_of_the_first_token_that_differs() -> None:
    device = torch.device("cpu")
    model = random_model("small", 0.5, device, torch.float32)
    engine = InferenceEngine(model, EngineOptions(device="cpu", max_model_len=64))
    expected = engine.logits([5, 6, 7, 8])[3].sort(descending=True).values
    found = throughput._gap(engine, [5, 6], [7, 8, 1, 3], [7, 8, 2, 9])
    assert found == pytest.approx(float(expected[0] - expected[1]), rel=1e-4)


def test_the_latency_model_stands_beside_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = ROOT / "benchmarks" / "results" / "nvidia_h200" / "serve.json"
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--predicted", str(record)])
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "performance" / "serving.md").read_text().splitlines()
    assert set(lines) <= set(page)
    # Llama-3.1-8B by hand: 7,504,658,432 multiplied weights and 8,256 tokens of 32 x 1,024 keys
    # and values, 2 bytes each, at 4.8e12 bytes a second
    seconds = 2 * (7_504_658_432 + 2 * 8256 * 32 * 1024) / 4.8e12
    (row,) = [line for line in lines if "| Llama-3.1-8B | 1 | 8192 | dense |" in line]
    assert f"| 8256 | {1e3 * seconds:.2f} | 4.57 |" in row


def test_a_device_whose_speeds_are_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "serve.json"
    record.write_text(json.dumps({"device": "Some CPU", "cases": []}))
    assert main(["serve", "--predicted", str(record)]) == 2
    assert "Some CPU: its speeds are not known" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["Llama-9"], ["small", "--new-tokens", "1"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err
