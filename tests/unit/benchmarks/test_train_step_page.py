"""The page of training steps matches the JSON; the projection is the sum of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train_step import page as train_step_page
from benchmarks.train_step import projection as train_step_projection
from benchmarks.train_step.projection import CASES, Measured
from benchmarks.train_step.shapes import Case, parse_layout

RESULTS = train_step_page.PAGE.parents[2] / "benchmarks" / "results"


def row(layout: str, kind: str, step_s: float, shape: str = "qwen2.5-7b") -> dict[str, Any]:
    case = Case(shape=shape, subject="ours", kind=kind, layout=parse_layout(layout), layers="local")
    return {
        "case": case.to_dict(),
        "label": case.label,
        "step_s": step_s,
        "low_s": step_s,
        "high_s": step_s,
        "tokens_per_s_gpu": case.tokens / step_s / case.layout.world,
        "model_tflops_gpu": case.model_flops / step_s / case.layout.world / 1e12,
        "max_memory_allocated": 9e10,
        "versions": {"torch": "2.11.0"},
        "run": "2026-01-01T00:00:00Z",
        "date": "2026-01-01",
        "commit": "abcdef1234",
        "profile": {"busy_ms": 80.0, "kinds": {"communication": 60.0, "optimizer": 40.0}},
    }


def test_the_page_is_filled_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin results -->\nold\n<!-- end results -->\nbelow\n")
    rows = [row("dp1", "distill", 0.5), row("dp2", "distill", 0.54), row("tp2_sp", "dms", 0.6)]
    record = {"device": "Some GPU", "rows": [*rows, {**rows[0], "failed": "out of memory"}]}
    (tmp_path / "some_gpu").mkdir()
    (tmp_path / "some_gpu" / "train_step.json").write_text(json.dumps(record))
    for _ in range(2):
        train_step_page.write(tmp_path, page)
    text = page.read_text()
    assert "old" not in text
    assert "out of memory" not in text
    assert "| qwen2.5-7b | dp2 | ours (local): teacher + KL | 540.0 [540.0, 540.0] |" in text
    assert "qwen2.5-7b distill: DP 2 reaches 0.926 of one GPU's fastest on each" in text
    assert "| central |" in text


def test_rows_of_a_command_without_a_recorded_time_are_shown() -> None:
    dated, undated = row("dp1", "distill", 0.5), row("dp1", "dms", 0.5)
    del undated["run"]
    page = list(train_step_page.page_lines({"device": "some", "rows": [undated, dated]}))
    table = [line for line in page if line.startswith("| qwen2.5-7b | dp1")]
    assert [line.split("|")[-2].strip() for line in table] == ["1", "?"]
    began = "1 began 2026-01-01T00:00:00Z (abcdef1, 2026-01-01), ? has no recorded time.\n"
    assert began in page


def test_without_the_measured_parts_nothing_is_projected() -> None:
    assert train_step_projection.measured([row("dp1", "dms", 0.5)]) is None
    assert list(train_step_projection.lines([row("tp2_sp", "distill", 0.5)])) == []


def test_rates_leave_out_exposed_communication_and_optimizer() -> None:
    measured_row = row("tp2_sp", "dms", 0.6)
    found = train_step_projection.measured([measured_row])
    assert found is not None
    flops = Case.from_dict(measured_row["case"]).model_flops / 2
    # of 60 ms of communication 20 ran while other kernels did
    assert found.rate == pytest.approx(flops / (0.6 - 0.08))
    # 14 collectives of 28 layers, 3 of the embedding and 3 of the head, each half of 8192 x 3584
    # bf16 numbers, in 60 ms
    assert found.link == pytest.approx((14 * 28 + 6) * 8192 * 3584 * 2 / 2 / 0.06)


def test_the_projection_adds_up() -> None:
    parts = train_step_projection.step_s(Measured(rate=5e14, link=2e11), CASES[1])
    assert sum(v for k, v in parts.items() if k != "total") == pytest.approx(parts["total"])
    # 16 microbatches, one more in the bubble
    once = (parts["passes"] + parts["tensor parallel"]) / 16
    assert parts["pipeline bubble"] == pytest.approx(once)
    faster = train_step_projection.step_s(Measured(rate=1e15, link=2e11), CASES[1])
    assert faster["passes"] == pytest.approx(parts["passes"] / 2)


@pytest.mark.parametrize(
    "file", sorted(RESULTS.glob("*/train_step.json")), ids=lambda f: f.parent.name
)
def test_the_committed_page_quotes_the_committed_json(file: Path) -> None:
    results = "\n".join(train_step_page.page_lines(json.loads(file.read_text())))
    assert results in train_step_page.PAGE.read_text()
