"""A run folder as one HTML file that loads nothing: plots, tables, configuration.

Everything comes from `metrics.jsonl` and `config.yaml`. The file also holds the rows as JSON, so
that programs can read them without the run folder.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.html_page import figure, page, table
from dms_train.evaluation.plots import Curve, curves_of, draw_curves, read_rows
from dms_train.inference.errors import InferenceError
from dms_train.inference.heatmap import draw_heatmap
from dms_train.training.state import describe_early_stop

KEPT, KEPT_LAYERS = "eval/kept", "eval/kept_layers"  # older runs have no layers
_VALIDATION = "validate_export/"
_EVALUATION = "eval/"
_EARLY_STOP = "early_stop/"
# Picture, unit of its axis, metrics in it.
PANELS = (
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
    pictures = drawn(_pictures(record.rows))
    parts = [
        _summary(record.rows),
        f"<h2>Training curves</h2><section>{pictures}</section>",
        _validation(record.rows),
        _evaluations(record.rows),
        f"<h2>All metrics</h2>{_metrics(curves_of(record.rows))}",
        f"<h2>Configuration</h2><pre>{html.escape(record.config)}</pre>" if record.config else "",
    ]
    return page(record.folder.resolve().name, parts, record.rows)


def drawn(pictures: Iterator[str]) -> str:
    """Draw pictures and return their HTML.

    Raises:
        EvaluationError: matplotlib is not installed.
    """
    try:
        return "".join(pictures)
    except (ImportError, InferenceError) as error:
        raise EvaluationError(
            f"a report needs matplotlib; pip install 'dms-train[eval]' ({error})"
        ) from error


def _pictures(rows: list[dict[str, Any]]) -> Iterator[str]:
    curves = curves_of(rows)
    for title, unit, names in PANELS:
        shown = {name: curves[name] for name in names if name in curves}
        if shown:
            picture = BytesIO()
            draw_curves(shown, unit, title, picture)
            yield figure(picture, title)
    kept = [row for row in rows if row.get(KEPT)]
    if kept:
        last, picture = kept[-1], BytesIO()
        title, shares = f"Tokens kept, step {last['step']}", torch.tensor(last[KEPT])
        draw_heatmap(shares, picture, title, "share", (0.0, 1.0), last.get(KEPT_LAYERS))
        yield figure(picture, title)


def _summary(rows: list[dict[str, Any]]) -> str:
    last = rows[-1]
    text = f"{last['step']:,} steps"
    if "tokens" in last:
        text += f", {last['tokens']:,} tokens"
    sentences = f"{text}, {len(rows):,} rows.", early_stop_sentence(rows)
    return f"<p>{' '.join(filter(None, sentences))}</p>"


def early_stop_sentence(rows: list[dict[str, Any]]) -> str:
    """Describe the early stop of a run; empty for a run without one."""
    for row in reversed(rows):
        stop = {n.removeprefix(_EARLY_STOP): v for n, v in row.items() if n.startswith(_EARLY_STOP)}
        if stop:
            return describe_early_stop(stop)
    return ""


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
    shown = table(["metric", "value", "95% from", "to"], lines)
    return f"<h2>Validation of the export</h2>{shown}"


def _evaluations(rows: list[dict[str, Any]]) -> str:
    evaluations = [row for row in rows if any(name.startswith(_EVALUATION) for name in row)]
    if not evaluations:
        return ""
    present = (name for row in evaluations for name in row if name.startswith(_EVALUATION))
    names = [name for name in dict.fromkeys(present) if name not in (KEPT, KEPT_LAYERS)]
    lines = [[row["step"], *(row.get(name) for name in names)] for row in evaluations]
    header = ["step", *(name.removeprefix(_EVALUATION) for name in names)]
    return f"<h2>Evaluations</h2>{table(header, lines)}"


def _metrics(curves: dict[str, Curve]) -> str:
    lines = [
        [name, values[-1], steps[-1], min(values), max(values)]
        for name, (steps, values) in sorted(curves.items())
    ]
    return table(["metric", "last", "at step", "least", "most"], lines)
