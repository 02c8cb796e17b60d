"""The benchmark of the plugin with vLLM's engine on a CPU; its times mean nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.serve.vllm_plugin import BENCHMARK, ON_CPU

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_every_part_is_measured(
    vllm_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in vllm_environment.items():
        monkeypatch.setenv(name, value)
    words = ["--device", "cpu", "--modes", "decode-graphs", "--new-tokens", "16"]
    words += ["--models", str(tmp_path / "models"), "--output", str(tmp_path)]
    words += ["--engine", f"{sys.executable} -m tests.support.vllm_benchmark"]
    parser = argparse.ArgumentParser()
    BENCHMARK.add_arguments(parser)
    assert BENCHMARK.run(parser.parse_args(words), parser, words) == 0
    (file,) = tmp_path.glob("*/vllm_plugin.json")
    *steps, capacity, storm = json.loads(file.read_text())["cases"]
    assert [(row["sequences"], row["context"]) for row in steps] == list(ON_CPU.steps)
    for row in steps:
        low, high = row["step_ms_spread"]
        assert 0 < low <= row["step_ms"] <= high
        assert 256 < row["live"] < row["context"]
    assert capacity["together"] == 2  # without eviction the blocks hold one sequence
    assert storm["equal"] == storm["sequences"] == ON_CPU.storm.sequences
    assert storm["preemptions"] > storm["preemptions_unlimited"] == 0
    assert storm["missing_blocks"] == storm["missing_pages"] == 0
