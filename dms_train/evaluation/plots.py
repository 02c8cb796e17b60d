"""The course of a run from its `metrics.jsonl`, as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Curve = tuple[list[int], list[float]]


def read_curves(rows: Path) -> dict[str, Curve]:
    """Steps and values of every metric; a line that was cut off by a crash is left out."""
    curves: dict[str, Curve] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError:
            continue
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return curves


def draw_training(rows: Path, path: Path) -> bool:
    """Loss above, compression ratio below, over steps; needs matplotlib.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = read_curves(rows)
    panels = [
        ("nats/token", ("train/kl", "train/lm", "valid/kl", "valid/lm")),
        ("compression ratio", ("train/target_cr", "train/cr", "valid/cr")),
    ]
    shown = [(label, [n for n in names if n in curves]) for label, names in panels]
    shown = [(label, names) for label, names in shown if names]
    if not shown:
        return False
    figure = Figure(figsize=(7, 2.6 * len(shown)), layout="constrained")
    for axes, (label, names) in zip(
        figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True
    ):
        for name in names:
            style = "o" if name.startswith("valid/") else "-"
            axes.plot(*curves[name], style, label=name)
        axes.set(xlabel="step", ylabel=label)
        axes.legend()
    FigureCanvasAgg(figure).print_png(path)
    return True
