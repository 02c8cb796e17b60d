"""The page of measured numbers matches the JSON, and the figure's tiles match the window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention import page as performance_page
from benchmarks.attention import prefill_cases, train_cases
from benchmarks.serve.models import random_model
from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.kernels.prefill import sparse
from scripts import draw_tiling

RESULTS = performance_page.ROOT / "benchmarks" / "results"


def row(name: str, kind: str, forward: float, backward: float) -> dict[str, Any]:
    shape = train_cases.SHAPES[0]
    flops = shape.flops()
    return {
        "name": name,
        "kind": kind,
        "forward_ms": {"median": forward, "low": forward, "high": forward},
        "backward_ms": {"median": backward, "low": backward, "high": backward},
        "total_ms": forward + backward,
        "forward_flops_per_s": flops[0] / forward * 1e3,
        "backward_flops_per_s": flops[1] / backward * 1e3,
        "extra_bytes": 2**20,
    }


def record(*, valid: bool | None = True) -> dict[str, Any]:
    rows = [row("cuDNN causal", "dense", 1, 3), row("flex DMS", "peer", 2, 6)]
    rows.append(row("ours: triton", "ours", 1, 4))
    shape = train_cases.SHAPES[0]
    case = {"shape": shape._asdict(), "label": shape.label, "window": 256, "dtype": "bfloat16"}
    return {
        "device": "Some GPU",
        "versions": {"torch": "2.11.0"},
        "command": "python -m benchmarks attention",
        "ceilings": {"copy_bytes_per_s": 4e12, "gemm_flops_per_s": 7e14, "gemm_edge": 8192},
        "train": [{**case, "rows": rows, "ratios": train_cases.ratios(rows)}],
        "recorded": [],
        "valid": valid,
    }


def stored(results: Path, run: dict[str, Any]) -> None:
    (results / "some_gpu").mkdir()
    (results / "some_gpu" / "attention.json").write_text(json.dumps(run))


def test_the_page_is_filled_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    begin, end = "<!-- begin results -->", "<!-- end results -->"
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    stored(tmp_path, record())
    for _ in range(2):
        performance_page.write(tmp_path, page)
    text = page.read_text()
    assert text.startswith(f"above\n{begin}\n")
    assert text.endswith(f"{end}\nbelow\n")
    assert "old" not in text
    assert "| ours: triton | 1.000 [1.000, 1.000] | 4.000 " in text
    assert "| 1.60 | 1.25 | 1 |" in text  # 8 ms of flex and 4 ms of cuDNN over 5 ms
    assert (tmp_path / performance_page.FIGURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("policy", "ratio"), [("keep_all", 1.0), ("dms", 1.25), ("dms", 8.0)])
def test_the_table_names_the_attention_that_the_engine_takes(
    policy: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes a prompt; whether it calls dense attention is compared."""
    dense: list[object] = []
    attend = sparse.causal_attention
    monkeypatch.setattr(sparse, "causal_attention", lambda *a: dense.append(a) or attend(*a))
    model = random_model("small", 0.5, torch.device("cpu"), torch.float32)
    options = EngineOptions(policy=policy, kernels="triton", max_num_seqs=1, max_model_len=64)
    engine = InferenceEngine(model, options)
    engine.add_request(list(range(40)), SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    assert prefill_cases.engine_takes(ratio) == ("dense" if dense else "kept tokens")


def test_an_invalid_run_is_not_shown(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("as it was")
    stored(tmp_path, record(valid=False))
    with pytest.raises(EvaluationError, match="some_gpu: the run is invalid"):
        performance_page.write(tmp_path, page)
    assert page.read_text() == "as it was"


def test_points_lie_at_their_arithmetic_intensity() -> None:
    decode = {"group": 4, "cache": "bf16", "tb_s": 3.0}
    found = list(
        performance_page.points(record() | {"decode": [decode, decode | {"cache": "fp8"}]})
    )
    names = ["cuDNN causal", "flex DMS", "ours: triton"]
    assert [p.series for p in found[:6]] == [
        f"{n}, {d}" for n in names for d in ("forward", "backward")
    ]
    # bf16: 4 b hq s^2 d / 2 operations on 2 (2 b hq s d + 2 b hk s d) bytes
    assert found[0].intensity == pytest.approx(4 * 12 * 8192 / 2 / (2 * 2 * (12 + 2)))
    assert found[1].intensity == pytest.approx(found[0].intensity * 2.5 / 2)
    assert [p.intensity for p in found[6:]] == [4.0, 8.0]
    assert [p.flops_per_s for p in found[6:]] == [12e12, 24e12]


@pytest.mark.parametrize(
    "file", sorted(RESULTS.glob("*/attention.json")), ids=lambda f: f.parent.name
)
def test_the_committed_page_quotes_the_committed_json(file: Path) -> None:
    run = json.loads(file.read_text())
    accuracy = file.with_name("accuracy.json")
    errors = json.loads(accuracy.read_text()) if accuracy.is_file() else None
    assert run["valid"] is not False
    results = "\n".join(performance_page.page_lines(run, errors))
    assert results in performance_page.PAGE.read_text()


@pytest.mark.parametrize("window", [1, 7, 8, 19, 40])
def test_tiles_are_classed_as_their_elements_are(window: int) -> None:
    edge = 8
    for row_ in range(8):
        for column in range(8):
            pairs = [
                (i - j > window, j > i)
                for i in range(row_ * edge, row_ * edge + edge)
                for j in range(column * edge, column * edge + edge)
            ]
            old, future = ([pair[k] for pair in pairs] for k in (0, 1))
            expected = "inside"
            if all(future):
                expected = None
            elif all(old):
                expected = "old"
            elif any(old):
                expected = "edge"
            elif any(future):
                expected = "diagonal"
            assert draw_tiling.tile_class(row_, column, edge, window) == expected


def test_the_figure_is_the_scripts() -> None:
    assert draw_tiling.FIGURE.read_text() == draw_tiling.draw()
