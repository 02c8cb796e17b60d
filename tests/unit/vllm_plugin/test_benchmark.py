"""The benchmark of the plugin with vLLM's engine on a CPU; its times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serve.vllm_plugin import ON_CPU
from tests.unit.vllm_plugin.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_every_part_is_measured(vllm_environment: dict[str, str], tmp_path: Path) -> None:
    words = ["serve", "vllm_plugin", "--device", "cpu", "--modes", "decode-graphs"]
    words += ["--new-tokens", "8", "--models", str(tmp_path / "models"), "--output", str(tmp_path)]
    words += ["--engine", f"{sys.executable} -m tests.support.vllm_benchmark"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        env=vllm_environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (file,) = tmp_path.glob("*/vllm_plugin.json")
    *steps, capacity, storm = json.loads(file.read_text())["cases"]
    assert [(row["sequences"], row["context"]) for row in steps] == list(ON_CPU.steps)
    for row in steps:
        low, high = row["step_ms_spread"]
        assert 0 < low <= row["step_ms"] <= high
        assert 256 < row["live"] < row["context"]
    assert capacity["together"] == 2  # without eviction the blocks hold one sequence
    assert storm["equal"] == storm["sequences"] == ON_CPU.storm.sequences
    assert storm["preemptions"] > storm["preemptions_with_room"] == 0
    assert storm["missing_blocks"] == storm["missing_pages"] == 0
