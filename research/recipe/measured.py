"""Numbers that the steps of a recipe have measured."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.records import origin
from dms_train.cli.config_source import compose
from dms_train.evaluation.analysis.needles import NeedleCell, needle_cells
from dms_train.evaluation.bootstrap import ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.comparison import (
    compare,
    published_scores,
    read_results,
    require_same_conditions,
)
from dms_train.evaluation.plots import read_rows
from dms_train.evaluation.scaling.results import load
from dms_train.hf.gguf_directory import describe_types, read_gguf_record
from research.recipe.chains import measured_chains
from research.recipe.evaluations import needle_contexts, needles_folder, perplexity_file, results
from research.recipe.seconds import measured_seconds
from research.recipe.steps import ORIGINAL, Model, Settings, Task, models, trainings

_METRICS = ("acc_norm", "acc", "exact_match", "pass@1")  # the first one that a task has
_BANDS = 5  # of the depths of needles
_Z = 1.96  # of a 95% interval


def measured(settings: Settings) -> dict[str, Any]:
    """Return the numbers of all trainings and models so far, as plain JSON."""
    device, original = torch.device(settings.device), _results(settings, ORIGINAL)
    return {
        "experiment": settings.recipe.experiment,
        "device": timing.device_name(device),
        "versions": timing.versions(device),
        **origin(),
        "weights": _weights(settings.original),
        "published": published_scores().get(settings.recipe.published or "", []),
        "trainings": {name: _training(given) for name, given in trainings(settings).items()},
        "models": [_model(settings, model, original) for model in models(settings)],
        "needles": [asdict(cell) for cell in _cells(settings)],
        "chains": measured_chains(settings),
        "seconds": measured_seconds(settings),
    }


def _weights(original: Path) -> str | None:
    """State how a converted model's weights were stored; None for other models."""
    record = read_gguf_record(original)
    return None if record is None else describe_types(record)


def _cells(settings: Settings) -> list[NeedleCell]:
    """Return the share of needles that each model finds, by length and depth."""
    contexts = needle_contexts(settings)
    return [
        replace(cell, label=model.name)
        for model in models(settings)
        for context in contexts
        if _is_finished(folder := needles_folder(settings, model.name, context))
        for cell in needle_cells([load([folder])], _BANDS)
    ]


def _training(overrides: list[str]) -> dict[str, float]:
    """Return steps, tokens and minutes of the steps; those of branches are counted separately."""
    config = compose(overrides)
    logged = read_rows(Path(config.run.dir) / "metrics.jsonl")
    rows = [row for row in logged if "train/tokens_per_second" in row]
    by_step = {row["step"]: row for row in rows}  # a resumed run repeats the steps since a save
    tokens, seconds = 0, 0.0
    for _, row in sorted(by_step.items()):
        seconds += (row["tokens"] - tokens) / row["train/tokens_per_second"]
        tokens = row["tokens"]
    hold = config.stage.hold
    held = [ratio for ratio in hold.branch_ratios or () if ratio < config.stage.retrofit.target_cr]
    size = config.data.seq_length * config.data.global_batch_size
    return {
        "steps": max(by_step),
        "tokens": tokens,
        "minutes": seconds / 60,
        "tokens_of_held_exports": len(held) * hold.steps * size,
    }


def _model(settings: Settings, model: Model, original: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what has been measured of a model; a part that has not finished is absent."""
    found: dict[str, Any] = {"name": model.name, "policy": model.policy, "options": model.options}
    validation = settings.root / "validation" / model.name / "metrics.json"
    if validation.is_file():
        found["validation"] = _read(validation)
    if (scored := _scored_text(settings, model.name)) is not None:
        of_original = None if model.name == ORIGINAL else _scored_text(settings, ORIGINAL)
        found["perplexity"] = perplexity(scored, of_original)
    found["needles"] = {
        str(context): _needles(folder)
        for context in needle_contexts(settings)
        if _is_finished(folder := needles_folder(settings, model.name, context))
    }
    if model.name == ORIGINAL and original is not None:
        found |= scores(original, None, settings.recipe.tasks)
    elif (own := _results(settings, model.name)) is not None:
        reference = comparable(model.name, own, original)
        found |= scores(own, reference, settings.recipe.tasks)
    return found


def _results(settings: Settings, name: str) -> dict[str, Any] | None:
    """Return the results of a model on the tasks that have finished; None without any."""
    folder = results(settings, name)
    return read_results(folder) if (folder / "results.json").is_file() else None


def _is_finished(run: Path) -> bool:
    """Return whether a folder of `dms-eval` has its results."""
    return (run / "summary.json").is_file()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _scored_text(settings: Settings, name: str) -> dict[str, Any] | None:
    """Return what `dms-eval perplexity` wrote of a model; None before it has."""
    path = perplexity_file(settings, name)
    return _read(path)["model"] if path.is_file() else None


def perplexity(
    scored: Mapping[str, Any], original: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return perplexity and compression ratio of whole windows and of continuations.

    Args:
        scored: What `dms-eval perplexity` wrote of a model.
        original: The same of its original; then each part has the `difference` in nats per token,
            paired over windows, with its 95% bootstrap interval.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in ("window", "continuation"):
        found[part] = {name: scored[part][name] for name in ("perplexity", "nats", "cr_factor")}
        if original is not None:
            pairs = zip(scored[part]["per_window"], original[part]["per_window"], strict=True)
            lost = [own - other for own, other in pairs]
            found[part]["difference"] = asdict(ratio(lost, [1.0] * len(lost)))
    return found


def _needles(folder: Path) -> dict[str, float]:
    """Return the share of needles that are found, with its interval, and costs."""
    (point,) = load([folder]).points()
    costs = {"reads_per_token": point.kv_reads / max(1.0, point.tokens - 1)}
    return asdict(point.accuracy) | costs | {"peak_tokens": point.peak_tokens}


def scores(
    found: Mapping[str, Any], original: Mapping[str, Any] | None, tasks: Sequence[Task]
) -> dict[str, Any]:
    """Return the scores of finished tasks, the mean of multiple choice, and the cost of the cache.

    Args:
        found: What `dms-eval harness` wrote of a model.
        original: The same of its original, for differences; None without. A task that it lacks
            has no difference.
        tasks: The tasks; without one of them there is no mean.
    """
    compared = map(asdict, compare(found, original, None, [task.key for task in tasks]))
    rows = {(row["task"], row["metric"]): row for row in compared}
    scored = {task.key: _score(found, rows, task.key) for task in tasks}
    measured = {key: score for key, score in scored.items() if score}
    choices = [score for key, score in measured.items() if _is_choice(found, key)]
    if len(measured) < len(tasks):  # means over other tasks would not compare
        return {"tasks": scored, "choices": None}
    kv = {name: value for name, value in found["dms"]["kv"].items() if name != "cr_factors"}
    return {"tasks": scored, "choices": _mean(choices), "kv": kv}


def comparable(
    name: str, own: Mapping[str, Any], original: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the results of the original; None with a warning if they have other conditions.

    Args:
        name: Name of the model, for the warning.
        own: What `dms-eval harness` wrote of it.
        original: The same of its original; None without.
    """
    if original is None:
        return None
    conditions = {block: own["dms"][block] for block in ("settings", "versions")}
    for block in ("tasks", "definitions"):  # of the tasks that both have finished
        known = original["dms"][block]
        conditions[block] = {key: v for key, v in own["dms"][block].items() if key in known}
    try:
        require_same_conditions(original, conditions, [])
    except EvaluationError as error:
        logger = logging.getLogger("dms_train")
        logger.warning("%s: no differences to the original (%s)", name, error)
        return None
    return original


def _score(
    found: Mapping[str, Any], rows: Mapping[tuple[str, str], dict[str, Any]], key: str
) -> dict[str, Any] | None:
    """Return the main metric of a task; None if it has none of them."""
    for metric in _METRICS:
        for (task, name), row in rows.items():
            if task == key and name.partition(",")[0] == metric:
                kind = name.partition(",")[2] or "none"
                error = found["results"][key].get(f"{metric}_stderr,{kind}")
                return {
                    "metric": name,
                    "score": row["model"],
                    "half_width": _Z * error if isinstance(error, float) else None,
                    "documents": row["documents"],
                    "difference": row["difference"],
                }
    return None


def _is_choice(found: Mapping[str, Any], key: str) -> bool:
    """Return whether a task, or each part of a group, is multiple choice."""
    if children := found.get("group_subtasks", {}).get(key):
        return all(_is_choice(found, child) for child in children)
    return bool(found["configs"][key]["output_type"] == "multiple_choice")


def _mean(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the mean over tasks, and its difference to the original.

    The tasks have different documents, so the squares of the half-widths add up.
    """
    if not scores:
        return None
    count = len(scores)
    found: dict[str, Any] = {"score": sum(each["score"] for each in scores) / count}
    differences = [each["difference"] for each in scores]
    if all(differences):
        value = sum(each["value"] for each in differences) / count
        widths = [(each["high"] - each["low"]) / 2 for each in differences]
        width = math.sqrt(sum(w**2 for w in widths)) / count
        found["difference"] = {"value": value, "low": value - width, "high": value + width}
    return found
