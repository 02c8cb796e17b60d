"""Figures of a report, drawn from its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dms_train.evaluation.analysis.charts import needle_chart, scaling_chart
from dms_train.evaluation.analysis.comparison import READS, VANILLA, Mark
from dms_train.evaluation.analysis.needles import NeedleCell
from dms_train.evaluation.scaling.budgets import Budget
from dms_train.evaluation.tasks.registry import task
from research.recipe.steps import ORIGINAL

_DMS, _RATIO = "DMS", "cr"  # names of exports are `cr2` and the like


def figures(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure as an SVG element, by its file name.

    `needles.svg` has the needles that each model finds, and `chains_TASK.svg` accuracy against the
    KV reads of chains. Parts that the record lacks have no figure.

    Args:
        numbers: Those of `report.json`.
    """
    found = {}
    for name, points in _tasks(numbers).items():
        title = f"{task(name).title}: accuracy against KV reads"
        found[f"chains_{name}.svg"] = scaling_chart(
            title, [_mark(point) for point in points], READS, (VANILLA, _DMS), links=False
        )
    if numbers["needles"]:
        cells = [NeedleCell(**cell) for cell in numbers["needles"]]
        found["needles.svg"] = needle_chart("Needles found, percent", cells)
    return found


def write_figures(numbers: Mapping[str, Any], folder: Path) -> None:
    """Write all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(numbers).items():
        (folder / name).write_text(f"{figure}\n", encoding="utf-8")


def _tasks(numbers: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the points of the original and the exports of DMS by their task."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for point in numbers.get("chains", {}).get("points", ()):  # records before 2026-11-27 have none
        if point["model"] == ORIGINAL or point["model"].startswith(_RATIO):
            grouped.setdefault(point["task"], []).append(point)
    return grouped


def _mark(point: Mapping[str, Any]) -> Mark:
    evicts = point["model"] != ORIGINAL
    ratio = float(point["model"].removeprefix(_RATIO)) if evicts else 1.0
    budget = Budget(point["length"], point["chains"], ratio)
    cost, accuracy = point[READS.name], point["accuracy"]["value"]
    return Mark(_DMS if evicts else VANILLA, budget, cost, accuracy, run="")
