"""Report of a recipe: every model on every task, and the model cards of its exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dms_train.evaluation.scaling.results import load
from dms_train.export.card import add_evaluation
from dms_train.tables import markdown_table
from research.recipe.evaluations import (
    needle_contexts,
    needles_folder,
    perplexity_file,
    results,
)
from research.recipe.steps import Settings, Task, exports, models

_METRICS = ("acc_norm", "acc", "exact_match", "pass@1")  # the first one that a task has
_VALIDATED = ("cr_factor", "kl_nats_per_token", "top1_agreement")
_PERPLEXITY = ("perplexity", "of continuations")
_Z = 1.96  # of a 95% interval


def write_report(settings: Settings) -> Path:
    """Write `report.md`, and the results of each export to its model card; return the report."""
    names = [model.name for model in models(settings)]
    tasks = settings.recipe.tasks
    validated = {name: _validated(settings, name) for name in exports(settings)}
    contexts = needle_contexts(settings)
    header = [
        *("model", *_VALIDATED, *(_PERPLEXITY if settings.held_out else ())),
        *(*(f"needles {context:,}" for context in contexts), *(task.key for task in tasks)),
    ]
    rows = [
        [
            *(name, *(_number(validated.get(name, {}), key) for key in _VALIDATED)),
            *(_perplexity(settings, name) if settings.held_out else ()),
            *(_found(needles_folder(settings, name, context)) for context in contexts),
            *(_score(results(settings, name), task) for task in tasks),
        ]
        for name in names
    ]
    table = markdown_table(header, rows)
    for name, export in exports(settings).items():
        add_evaluation(export, validated[name], table)
    report = settings.root / "report.md"
    report.write_text(f"# {settings.recipe.experiment}\n\n{table}\n", encoding="utf-8")
    return report


def _validated(settings: Settings, name: str) -> dict[str, float]:
    text = (settings.root / "validation" / name / "metrics.json").read_text(encoding="utf-8")
    numbers: dict[str, float] = json.loads(text)
    return numbers


def _number(numbers: dict[str, float], key: str) -> str:
    return f"{numbers[key]:.4g}" if key in numbers else "-"


def _perplexity(settings: Settings, name: str) -> list[str]:
    """Return the perplexity of whole windows and of continuations."""
    found = json.loads(perplexity_file(settings, name).read_text(encoding="utf-8"))["model"]
    return [f"{found[part]['perplexity']:.2f}" for part in ("window", "continuation")]


def _found(folder: Path) -> str:
    (point,) = load([folder]).points()
    return str(point.accuracy)


def _score(folder: Path, task: Task) -> str:
    """Return the main metric of a task with its 95% interval."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    values = found["results"][task.key]
    for metric in _METRICS:
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if name == metric:
                error = values.get(f"{name}_stderr,{kind}", float("nan"))
                return f"{value:.3f} +- {_Z * float(error):.3f}"
    return "-"
