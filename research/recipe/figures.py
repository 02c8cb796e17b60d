"""Figures of a report, drawn from its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dms_train.evaluation.analysis.charts import needle_chart, scaling_chart
from dms_train.evaluation.analysis.comparison import PEAK, READS, VANILLA, Cost, Mark
from dms_train.evaluation.analysis.needles import NeedleCell
from dms_train.evaluation.scaling.budgets import Budget
from dms_train.evaluation.tasks.registry import task
from research.recipe.steps import ORIGINAL

_DMS = "DMS"
CHAIN_FIGURES = {READS: "chains", PEAK: "peak"}  # beginnings of file names
_TIME = Cost("seconds", "milliseconds", "all of them submitted together")
_EXPORT = re.compile(r"cr(\d+(?:\.\d+)?)")  # the name of an export of DMS


def figures(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure as an SVG element, by its file name.

    `needles.svg` has the needles that each model finds, `chains_TASK.svg` and `peak_TASK.svg`
    accuracy against the KV reads and the peak tokens of chains, and `seconds_TASK.svg` accuracy
    against seconds. Parts that the record lacks have no figure.

    Args:
        numbers: Those of `report.json`.
    """
    drawn = {}
    for cost, file in CHAIN_FIGURES.items():
        for name, marks in chain_tasks(numbers, cost).items():
            title = f"{task(name).title}: accuracy against {cost.title}"
            drawn[f"{file}_{name}.svg"] = scaling_chart(title, marks, cost, (VANILLA, _DMS))
    for name, marks in seconds_tasks(numbers).items():
        title = f"{task(name).title}: accuracy against seconds"
        drawn[f"seconds_{name}.svg"] = scaling_chart(title, marks, _TIME, (VANILLA, _DMS))
    if numbers["needles"]:
        cells = [NeedleCell(**cell) for cell in numbers["needles"]]
        drawn["needles.svg"] = needle_chart("Needles found, percent", cells)
    return drawn


def write_figures(numbers: Mapping[str, Any], folder: Path) -> bool:
    """Write all figures into a folder; return whether there are any."""
    drawn = figures(numbers)
    if drawn:
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        (folder / name).write_text(f"{figure}\n", encoding="utf-8")
    return bool(drawn)


def chain_tasks(numbers: Mapping[str, Any], cost: Cost) -> dict[str, list[Mark]]:
    """Return the points of the original and the exports of DMS at this cost, by their task."""
    grouped: dict[str, list[Mark]] = {}
    for point in numbers.get("chains", {}).get("points", ()):  # records before 2026-11-27 have none
        mark = _mark(point, point[cost.name], point["accuracy"]["value"])
        if mark is not None:
            grouped.setdefault(point["task"], []).append(mark)
    return grouped


def seconds_tasks(numbers: Mapping[str, Any]) -> dict[str, list[Mark]]:
    """Return accuracy and time of the original and the exports of DMS, by their task.

    The cost is the time of all problems in milliseconds, divided by their number.
    """
    grouped: dict[str, list[Mark]] = {}
    for name, found in numbers.get("seconds", {}).items():
        problems = found["settings"]["problems"]
        for model, measured in found["models"].items():
            for each in measured["budgets"]:
                point = each | {"model": model, "chains": each["width"]}
                mark = _mark(point, 1000 * each["seconds"] / problems, each["accuracy"])
                if mark is not None:
                    grouped.setdefault(name, []).append(mark)
    return grouped


def method_of(model: str) -> tuple[str, float] | None:
    """Return the method of a model of the report, and its ratio; None for a control or a policy."""
    if model == ORIGINAL:
        return VANILLA, 1.0
    export = _EXPORT.fullmatch(model)
    return None if export is None else (_DMS, float(export[1]))


def _mark(point: Mapping[str, Any], cost: float, accuracy: float) -> Mark | None:
    """Return the point of a figure; None for a control, and for other methods."""
    found = method_of(point["model"])
    if found is None:
        return None
    method, ratio = found
    return Mark(method, Budget(point["length"], point["chains"], ratio), cost, accuracy, run="")
