"""Plots of the course of a run, drawn from its `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

Curve = tuple[list[int], list[float]]
# Old components of metric names, and their present names.
_RENAMED = {
    "export_eval": "validate_export",
    "export_tasks": "run_tasks",
    "neuron_scale": "channel_scale",
}


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`; a line that a crash cut off is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({_current_name(name): value for name, value in row.items()})
    return rows


def _current_name(metric: str) -> str:
    return "/".join(_RENAMED.get(part, part) for part in metric.split("/"))


def curves_of(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return steps and values of every metric that is a number."""
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return curves


def draw_curves(
    curves: dict[str, Curve], unit: str, title: str, target: BinaryIO, metric: str | None = None
) -> None:
    """Write a PNG of curves over steps, evaluations as points; needs matplotlib.

    Args:
        curves: Curves by their label.
        unit: Label of the vertical axis.
        title: Title of the picture.
        target: Open file.
        metric: Metric of all curves; None if each label is the metric of its curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    _plot(figure.add_subplot(), curves, unit, metric).set_title(title)
    FigureCanvasAgg(figure).print_png(target)


def _plot(axes: Any, curves: dict[str, Curve], unit: str, metric: str | None = None) -> Any:
    for label, curve in curves.items():
        name = metric or label
        rare = name.startswith("eval/") or name.endswith("checkpoint_seconds")
        alone = rare or len(curve[0]) == 1
        axes.plot(*curve, "o" if alone else "-", label=label)
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.legend()
    return axes


def draw_training(rows: Path, path: Path) -> bool:
    """Draw loss above and compression ratio below, over steps; needs matplotlib.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = curves_of(read_rows(rows))
    panels = [
        ("nats/token", ("train/kl", "train/lm", "eval/kl", "eval/lm")),
        ("CR (tokens / cache slots)", ("train/target_cr", "train/cr", "eval/cr")),
    ]
    shown = [(label, [n for n in names if n in curves]) for label, names in panels]
    shown = [(label, names) for label, names in shown if names]
    if not shown:
        return False
    figure = Figure(figsize=(7, 2.6 * len(shown)), layout="constrained")
    for axes, (label, names) in zip(
        figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True
    ):
        _plot(axes, {name: curves[name] for name in names}, label)
    FigureCanvasAgg(figure).print_png(path)
    return True
