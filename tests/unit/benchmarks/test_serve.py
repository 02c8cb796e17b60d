"""The benchmark of the engine on a CPU: its numbers of the cache, and refused options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.serve import __main__ as serve
from benchmarks.serve import throughput
from benchmarks.serve.models import WINDOW, random_model
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions

NEW = 9
ROOT = Path(__file__).resolve().parents[3]


def test_every_way_is_measured_and_decisions_evict(tmp_path: Path) -> None:
    words = ["small", "--device", "cpu", "--new-tokens", str(NEW), "--output", str(tmp_path)]
    assert serve.main(words) == 0
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


def test_many_sequences_forks_and_chains_are_measured(tmp_path: Path) -> None:
    assert throughput.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
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
    assert serve.main(["--predicted", str(record)]) == 0
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
    assert serve.main(["--predicted", str(record)]) == 2
    assert "Some CPU: its speeds are not known" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["Llama-9"], ["small", "--new-tokens", "1"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err
