"""A run folder as one HTML file that loads nothing: plots, tables, configuration.

Everything comes from `metrics.jsonl` and `config.yaml`. The file also holds the rows as JSON, so
that programs can read them without the run folder.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.plots import Curve, curves_of, draw_curves, read_rows
from dms_train.inference.errors import InferenceError
from dms_train.inference.heatmap import draw_heatmap
from dms_train.tables import html_table

KEPT = "eval/kept"
_VALIDATION = "validate_export/"
_EVALUATION = "eval/"
# Picture, unit of its axis, metrics in it.
_PANELS = (
    ("Loss and compression loss", "nats/token", ("train/loss", "train/aux_loss")),
    ("Token loss", "nats/token", ("train/kl", "train/lm", "eval/kl", "eval/lm")),
    (
        "Compression ratio, target and achieved",
        "tokens / cache slots",
        ("train/target_cr", "train/cr", "eval/cr"),
    ),
    ("Share of tokens decided against", "share of tokens", ("train/alpha", "eval/alpha")),
    ("Gradient norm", "L2 norm before clipping", ("train/grad_norm",)),
    ("Learning rate", "learning rate", ("train/lr",)),
    ("Throughput", "tokens/s", ("train/tokens_per_second",)),
    ("Model FLOPs", "TFLOP/s per device", ("train/tflops_per_device",)),
    ("Model FLOPs utilization", "share of the peak", ("train/mfu",)),
    ("Memory of the fullest process", "GiB", ("train/memory_gib",)),
    ("Writing a checkpoint", "seconds", ("train/checkpoint_seconds",)),
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1, h2 { font-weight: 600 } figure { margin: 0 }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem }
img { max-width: 100% } table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } pre { background: #f6f6f6; padding: 1rem }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Contents of a run folder.

    Attributes:
        folder: The run folder.
        rows: Rows of `metrics.jsonl`, in the order they were written.
        config: Text of `config.yaml`; empty when there is none.
    """

    folder: Path
    rows: list[dict[str, Any]]
    config: str


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        EvaluationError: The folder holds no metrics.
    """
    file, config = folder / "metrics.jsonl", folder / "config.yaml"
    rows = read_rows(file) if file.is_file() else []
    if not rows:
        raise EvaluationError(f"{folder}: no rows in metrics.jsonl; give the folder of a run")
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return RunRecord(folder=folder, rows=rows, config=text)


def render(record: RunRecord) -> str:
    """Return the whole page.

    Raises:
        EvaluationError: matplotlib is not installed.
    """
    try:
        pictures = "".join(_pictures(record.rows))
    except (ImportError, InferenceError) as error:
        raise EvaluationError(
            f"a report needs matplotlib; pip install 'dms-train[eval]' ({error})"
        ) from error
    name = html.escape(record.folder.resolve().name)
    lines = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        # a reader's guarantee: a browser refuses to load anything for this page
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        _summary(record.rows),
        f"<h2>Course</h2><section>{pictures}</section>",
        _validation(record.rows),
        _evaluations(record.rows),
        f"<h2>All metrics</h2>{_metrics(curves_of(record.rows))}",
        f"<h2>Configuration</h2><pre>{html.escape(record.config)}</pre>" if record.config else "",
        f"<script type='application/json' id='metrics'>{_embedded(record.rows)}</script>",
        "</body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _pictures(rows: list[dict[str, Any]]) -> Iterator[str]:
    curves = curves_of(rows)
    for title, unit, names in _PANELS:
        shown = {name: curves[name] for name in names if name in curves}
        if shown:
            picture = BytesIO()
            draw_curves(shown, unit, title, picture)
            yield _figure(picture, title)
    kept = [row for row in rows if row.get(KEPT)]
    if kept:
        picture, step = BytesIO(), kept[-1]["step"]
        title = f"Tokens kept, step {step}"
        draw_heatmap(torch.tensor(kept[-1][KEPT]), picture, title, "share", (0.0, 1.0))
        yield _figure(picture, title)


def _figure(picture: BytesIO, title: str) -> str:
    data = base64.b64encode(picture.getvalue()).decode("ascii")
    return f"<figure><img alt='{html.escape(title)}' src='data:image/png;base64,{data}'></figure>"


def _summary(rows: list[dict[str, Any]]) -> str:
    last = rows[-1]
    text = f"{last['step']:,} steps"
    if "tokens" in last:
        text += f", {last['tokens']:,} tokens"
    return f"<p>{text}, {len(rows):,} rows.</p>"


def _validation(rows: list[dict[str, Any]]) -> str:
    """Return the last validation of the export; intervals are in one row with their value."""
    validations = [row for row in rows if any(name.startswith(_VALIDATION) for name in row)]
    if not validations:
        return ""
    values = {
        name.removeprefix(_VALIDATION): value
        for name, value in validations[-1].items()
        if name.startswith(_VALIDATION)
    }
    own = [name for name in values if not name.endswith((".low", ".high"))]
    lines = [[name, *(values.get(f"{name}{end}") for end in ("", ".low", ".high"))] for name in own]
    table = _table(["metric", "value", "95% from", "to"], lines)
    return f"<h2>Validation of the export</h2>{table}"


def _evaluations(rows: list[dict[str, Any]]) -> str:
    evaluations = [row for row in rows if any(name.startswith(_EVALUATION) for name in row)]
    if not evaluations:
        return ""
    present = (name for row in evaluations for name in row if name.startswith(_EVALUATION))
    names = [name for name in dict.fromkeys(present) if name != KEPT]
    lines = [[row["step"], *(row.get(name) for name in names)] for row in evaluations]
    header = ["step", *(name.removeprefix(_EVALUATION) for name in names)]
    return f"<h2>Evaluations</h2>{_table(header, lines)}"


def _metrics(curves: dict[str, Curve]) -> str:
    lines = [
        [name, values[-1], steps[-1], min(values), max(values)]
        for name, (steps, values) in sorted(curves.items())
    ]
    return _table(["metric", "last", "at step", "least", "most"], lines)


def _table(header: list[str], lines: list[list[Any]]) -> str:
    return html_table(header, (map(_cell, line) for line in lines))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return f"{value:,.0f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _embedded(rows: list[dict[str, Any]]) -> str:
    """Return the rows as JSON that cannot end the element around it."""
    return json.dumps(rows).replace("<", "\\u003c")
