"""Tables of serving: which rows stand beside each other, and pages that quote the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import summary
from benchmarks.records import RESULTS
from benchmarks.serve import page as serve_page
from benchmarks.serve import tables


def row(engine: str, step_ms: float, **more: Any) -> dict[str, Any]:
    case = {"shape": "Llama-3.2-1B", "sequences": 1, "context": 8192, "prefill_tok_s": 100}
    spread = [step_ms, step_ms]
    return {"engine": engine, "step_ms": step_ms, "step_ms_spread": spread, **case, **more}


ROWS = [
    row("vLLM 1", 4.0, mode="default", cache_dtype="fp8", prefill_tok_s=50),
    row("vLLM 1", 5.0, mode="graphs for decoding", cache_dtype="fp8", prefill_tok_s=80),
    row("vLLM 1", 3.0, mode="default", cache_dtype="auto"),
    row("dense", 9.0, date="2026-01-01"),
    row("dense", 2.0, date="2026-01-02", live=8000),
    row("DMS", 1.0, date="2026-01-01", live=1000),
    row("DMS, FP8 pages", 0.5, date="2026-01-01"),
]


def test_the_engine_and_dms_are_told_apart() -> None:
    """The faster mode of vLLM for each number, the newest row of ours; ratios by hand."""
    heads, _, step = tables.side_by_side(ROWS, "step_ms").splitlines()
    assert heads.split("|")[3].strip() == "vLLM, FP8 cache"  # leads
    cells = [cell.strip() for cell in step.split("|")[3:-1]]
    assert cells == ["4.00", "3.00", "2.00", "1.00", "0.50", "0.67", "0.50", "0.25", "0.33", "8.00"]
    *_, prefill = tables.side_by_side(ROWS, "prefill_tok_s").splitlines()
    assert [cell.strip() for cell in prefill.split("|")[3:5]] == ["80", "100"]


def test_missing_and_skipped_rows_are_told_apart() -> None:
    skipped = {**row("dense", 0.0), "skipped": "the KV cache holds 1 of 2 sequences at once"}
    del skipped["step_ms"], skipped["step_ms_spread"]
    *_, line = tables.side_by_side([skipped, ROWS[5]], "step_ms").splitlines()
    cells = [cell.strip() for cell in line.split("|")[3:-1]]
    assert cells[:4] == ["not measured", "not measured", "does not fit", "1.00"]
    assert cells[5:] == [""] * 5
    assert skipped["skipped"] in tables.every_row([skipped])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Records of two GPUs and a CPU."""
    for name, date, step in (("H100", "2026-01-02", 7.0), ("H200", "2026-01-01", 6.0)):
        record = {"device": f"NVIDIA {name}", "versions": {"torch": "2"}, "window": 256}
        record["cases"] = [row("DMS", step, date=date, commit="0123456789", live=1000)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "serve.json").write_text(json.dumps(record))
    (tmp_path / "cpu").mkdir()
    cpu = {"device": "CPU x86", "cases": [row("DMS", 99.0, date="2026-02-02")]}
    (tmp_path / "cpu" / "serve.json").write_text(json.dumps(cpu))
    return tmp_path


def test_every_gpu_is_on_the_page_and_the_newest_comes_first(results: Path) -> None:
    parts = serve_page.parts(results)
    text = parts["results"]
    assert text.index("### NVIDIA H100") < text.index("### NVIDIA H200")
    assert "| 7.00 (7.00 to 7.00) | 100 | 1000 | 0123456, 2026-01-02 |" in text
    assert "99.00" not in text
    assert "NVIDIA H100:" in parts["latency"]
    assert parts["online"] == ""


def test_the_summary_has_the_newest_record_of_each_shape(results: Path) -> None:
    lines = summary.text(results).splitlines()
    (steps,) = [line for line in lines if "ms of a decode step" in line]
    assert "NVIDIA H100, 2026-01-02" in steps


def test_the_stored_records_are_on_the_pages() -> None:
    """Run the commands `page` and `summary` after a measurement."""
    text = serve_page.PAGE.read_text()
    for name, part in serve_page.parts(RESULTS).items():
        assert f"<!-- begin {name} -->\n{part}\n<!-- end {name} -->" in text, name
    table = f"<!-- begin speed -->\n{summary.text(RESULTS)}\n<!-- end speed -->"
    assert " ".join(table.split()) in " ".join(summary.PAGE.read_text().split())
