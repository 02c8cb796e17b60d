"""The benchmark of the plugin with vLLM's engine on a CPU; its times mean nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve.vllm_plugin import BENCHMARK, ON_CPU
from tests.unit.vllm_plugin.conftest import declare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def measured(
    vllm_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[dict[str, Any]]]:
    """Rows of parts, for example `steps,storm`."""
    site = declare(tmp_path, "vllm.general_plugins")
    path = f"{vllm_environment['PYTHONPATH']}{os.pathsep}{site}"
    for name, value in {**vllm_environment, "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, value)

    def _measured(parts: str) -> list[dict[str, Any]]:
        words = ["--device", "cpu", "--modes", "decode-graphs", "--new-tokens", "16"]
        words += ["--models", str(tmp_path / "models"), "--output", str(tmp_path)]
        words += ["--engine", f"{sys.executable} -m tests.support.vllm_benchmark"]
        words += ["--parts", parts]
        parser = argparse.ArgumentParser()
        BENCHMARK.add_arguments(parser)
        assert BENCHMARK.run(parser.parse_args(words), parser, words) == 0
        (file,) = tmp_path.glob("*/vllm_plugin.json")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
        return rows

    return _measured


def test_steps_are_measured(measured: Any) -> None:
    steps = measured("steps")
    assert [(row["sequences"], row["context"]) for row in steps] == list(ON_CPU.steps)
    for row in steps:
        low, high = row["step_ms_spread"]
        assert 0 < low <= row["step_ms"] <= high
    evicted, whole = (row["live"] for row in steps)
    assert 256 < evicted < 300
    assert whole >= 20 + 16


def test_sequences_are_counted_in_blocks_that_hold_one_without_eviction(measured: Any) -> None:
    capacity, grown = measured("capacity,grown")
    assert capacity["together"] == grown["together"] == 2


def test_a_trace_is_measured(measured: Any) -> None:
    (trace,) = measured("trace")
    assert [probe["in_flight"] for probe in trace["probes"]] == [1, 2, 3]
    assert trace["requests_s"] == max(probe["requests_s"] for probe in trace["probes"]) > 0
    assert 0 < trace["itl_ms"]["p50"] <= trace["itl_ms"]["p99"]


def test_a_storm_is_measured(measured: Any) -> None:
    (storm,) = measured("storm")
    assert storm["equal"] == storm["sequences"] == 8
    assert storm["preemptions"] > storm["preemptions_unlimited"] == 0
    assert storm["missing_blocks"] == storm["missing_pages"] == 0


def test_the_client_of_vllm_measures_its_server(measured: Any) -> None:
    pytest.importorskip("model_hosting_container_standards", reason="vLLM's server needs it")
    (row,) = measured("server")
    assert row["rate"] == 100
    assert row["tokens_s"] / row["requests_s"] == pytest.approx(row["new_tokens"], rel=0.2)
    for name in ("itl_ms", "ttft_ms"):
        assert 0 < row[name]["p50"] <= row[name]["p99"]
