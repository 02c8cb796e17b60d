"""Tables of training steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.tables import Column, field, table
from benchmarks.train_step.shapes import Case


def _case(row: dict[str, Any]) -> Case:
    return Case.from_dict(row["case"])


def _layout(row: dict[str, Any]) -> str:
    case = _case(row)
    return case.layout.label + (f" x {case.microbatches}" if case.microbatches > 1 else "")


def _label(row: dict[str, Any]) -> str:
    case = _case(row)
    return case.label + (f", {case.recompute} recompute" if case.recompute else "")


def _step_ms(row: dict[str, Any]) -> str:
    step, low, high = (f"{1e3 * row[name]:.1f}" for name in ("step_s", "low_s", "high_s"))
    return f"{step} [{low}, {high}]"


NAMES = 3  # columns that name a row
COLUMNS: tuple[Column, ...] = (
    ("shape", lambda row: _case(row).shape),
    ("layout", _layout),
    ("", _label),
    ("step ms", _step_ms),
    ("tokens/s/GPU", field("tokens_per_s_gpu", ",.0f")),
    ("model-TFLOP/s/GPU", field("model_tflops_gpu", ".0f")),
    ("peak GB", field("max_memory_allocated", ".1f", 1e-9)),
)


def tables(record: dict[str, Any]) -> str:
    """Return a row for each case, and the ratios of ours."""
    return "\n".join([table(COLUMNS, record["rows"], NAMES), "", *ratio_lines(record["rows"])])


def ratio_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield our ratios of one run and setting: DMC / DMS, DMS / distillation, distillation / LM."""
    times: dict[tuple[str, str | None], dict[str, float]] = {}
    for row in rows:
        case = Case.from_dict(row["case"])
        if case.subject == "ours" and "failed" not in row:
            setting = {key: value for key, value in case.setting.items() if key != "kind"}
            times.setdefault((json.dumps(setting), row.get("run")), {})[case.kind] = row["step_s"]
    for (text, _), seconds in times.items():
        case = Case.from_dict({**json.loads(text), "kind": "lm"})
        eager = ", eager" if case.cuda_graph == "never" else ""
        how = f"{case.layers}{', FP8' * case.fp8}{eager}"
        where = f"{case.shape} {case.layout.label} ({how})"
        for over, under in (("dmc", "dms"), ("dms", "distill"), ("distill", "lm")):
            if over in seconds and under in seconds:
                yield f"{where}: {over} / {under} = {seconds[over] / seconds[under]:.3f}"
