"""Accuracy against seconds: the original and its exports with the same bytes of cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dms_train.evaluation.analysis.comparison import Margin, Sample, margin_of
from research.lab.step import Step
from research.recipe.chains import asked, permitted
from research.recipe.figures import method_of
from research.recipe.steps import ORIGINAL, Settings, exports
from research.wall_clock import table

_LENGTHS, _WIDTHS = (0.5, 1, 2), (1, 4, 16)  # tokens of a chain / 1,024; chains of a problem
_BUDGETS = ",".join(f"{length}-{width}" for length in _LENGTHS for width in _WIDTHS)
_PROBLEMS = 100
_CACHE_BYTES = 256_000_000
_ROWS = 512  # chains at the same time, if they fit into the cache
_WORKERS = 8  # processes that compare answers or run programs after the clock stops


def seconds_steps(settings: Settings, before: Sequence[str]) -> list[Step]:
    """Return a step for each task and model; they run one at a time, since they measure time.

    Args:
        settings: Choices of the user.
        before: Names of all other steps, which run first.
    """
    steps, needs = list[Step](), tuple(before)
    for task in permitted(settings, settings.recipe.timed):
        for name, model in _models(settings).items():
            words = partial(_words, settings, task, name, model)
            steps.append(Step(name=_name(task, name), words=words, needs=needs))
            needs = (steps[-1].name,)
    return steps


def _name(task: str, model: str) -> str:
    return f"seconds_{task}_{model}"


def _models(settings: Settings) -> dict[str, Path]:
    """Return the directory of the original and of each export by its name."""
    return {ORIGINAL: settings.original} | exports(settings)


def _words(settings: Settings, task: str, name: str, model: Path) -> list[str]:
    """Return the command that measures a model."""
    return [
        *("-m", "research", "wall-clock", "--models", f"{name}={model}", "--budgets", _BUDGETS),
        *("--output", str(_file(settings, task, name)), f"model.device={settings.device}"),
        *asked(settings, task, min(_PROBLEMS, settings.limit)),
        *(f"model.cache_bytes={_CACHE_BYTES}", f"model.max_num_seqs={_ROWS}"),
        f"run.workers={_WORKERS}",
    ]


def _file(settings: Settings, task: str, name: str) -> Path:
    return settings.root / "seconds" / task / f"{name}.json"


def measured_seconds(settings: Settings) -> dict[str, Any]:
    """Return settings and budgets of the models that have finished, by task."""
    found: dict[str, Any] = {}
    for task in settings.recipe.timed:
        for name in _models(settings):
            if (settings.root / "state" / f"{_name(task, name)}.done").is_file():
                record = json.loads(_file(settings, task, name).read_text(encoding="utf-8"))
                of_task = found.setdefault(task, {"settings": record["settings"], "models": {}})
                of_task["models"] |= record["models"]
    return found


def seconds_text(numbers: Mapping[str, Any]) -> str:
    """Return the tables of `measured_seconds` as Markdown."""
    parts = []
    for task, found in numbers.items():
        given = found["settings"]
        parts.append(
            f"{task}: {given['problems']} problems submitted together; as many chains run as fit "
            f"into a cache of {given['cache_bytes'] / 1e6:,.0f} MB. Lengths are in units of 1,024 "
            f"tokens, and seconds are the median of {given['repeats']} repetitions:"
        )
        parts.append(table(found["models"]))
        if margins := seconds_margins(found):
            parts.append(_margins_text(margins))
    return "\n\n".join(parts)


def seconds_margins(found: Mapping[str, Any]) -> list[Margin]:
    """Compare each export of DMS with the original at equal seconds, where both have some.

    A frontier of several exports would gain from their number, since it keeps the best of
    uncertain points.

    Args:
        found: One task of `measured_seconds`. Without the scores of its problems, which older
            records lack, margins have no interval.
    """
    task, budgets = found["settings"]["task"], {}
    for name, model in found["models"].items():
        if method_of(name) is not None:
            budgets[name] = model["budgets"]
    original = budgets.pop(ORIGINAL, [])
    margins = []
    for name, own in budgets.items():
        value, interval = margin_of([_sample(own)], [_sample(original)] if original else [])
        if value is not None:
            known = all("scores" in budget for budget in (*own, *original))
            margins.append(Margin(task, name, ORIGINAL, value, interval if known else None))
    return margins


def _sample(budgets: Sequence[Mapping[str, Any]]) -> Sample:
    """Return the points of a model; every problem has the time of all of them together."""
    scores = torch.tensor(
        [budget.get("scores", [budget["accuracy"]]) for budget in budgets], dtype=torch.float64
    )
    seconds = torch.tensor([[budget["seconds"]] for budget in budgets], dtype=torch.float64)
    problems = tuple(map(str, range(scores.shape[1])))
    return Sample(problems, scores, seconds.expand_as(scores))


def _margins_text(margins: Sequence[Margin]) -> str:
    text = (
        "Each export minus the original at equal seconds, in accuracy points: the margin of their "
        "Pareto frontiers, linear in seconds"
    )
    if any(margin.interval is not None for margin in margins):
        text += ", with 95% intervals over problems at the median times"
    return f"{text}: {', '.join(map(_points, margins))}."


def _points(margin: Margin) -> str:
    ends = "" if margin.interval is None else " [{:+.1f}, {:+.1f}]".format(*margin.interval)
    return f"{margin.first} {margin.value:+.1f}{ends}"
