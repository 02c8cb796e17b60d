"""A model beside its original, task by task, and beside published scores."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.tables import markdown_table

_PUBLISHED = "assets/published_scores.json"
_HEADER = ("task", "metric", "shots", "documents", "original", "model", "difference", "published")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScore:
    """One metric of a task.

    Attributes:
        task: Task or group.
        metric: Metric and filter, as the harness names them.
        shots: Examples before each question.
        documents: Number of evaluated documents.
        model: Score of the model.
        original: Score of the original; None without one.
        difference: Mean over documents of model minus original, with its 95% bootstrap interval;
            None unless the metric is a mean over documents and both runs have them.
        published: Published scores, with settings and source.
    """

    task: str
    metric: str
    shots: int | None
    documents: int
    model: float
    original: float | None
    difference: Estimate | None
    published: list[dict[str, Any]]


@cache
def published_scores() -> dict[str, list[dict[str, Any]]]:
    """Return published scores by model: `task`, `metric`, `value`, `settings` and `source`."""
    text = files("dms_train").joinpath(_PUBLISHED).read_text(encoding="utf-8")
    scores: dict[str, list[dict[str, Any]]] = json.loads(text)
    return scores


def require_published(name: str | None) -> None:
    """Raise EvaluationError for a model without published scores."""
    if name is not None and name not in published_scores():
        known = ", ".join(published_scores())
        raise EvaluationError(f"--published {name}: no scores; choose one of {known}")


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results of an earlier run, with its samples if they were written.

    Raises:
        EvaluationError: A file is damaged.
    """
    path = folder / "results.json"
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        results["samples"] = {}
        for path in sorted(folder.glob("samples_*.jsonl")):
            lines = path.read_text(encoding="utf-8").splitlines()
            results["samples"][path.stem.removeprefix("samples_")] = list(map(json.loads, lines))
    except ValueError as error:
        raise EvaluationError(f"{path}: damaged ({error})") from None
    return results


def warn_without_samples(results: Mapping[str, Any], folder: Path) -> None:
    """Warn that results lack the samples of their documents."""
    if not results["samples"]:
        logging.getLogger("dms_train").warning(
            "%s: no samples_*.jsonl, which the intervals of differences need; "
            "evaluate the original with --log-samples",
            folder,
        )


def require_same_conditions(
    original: Mapping[str, Any], conditions: Mapping[str, Any], tasks: list[str]
) -> None:
    """Raise EvaluationError if stored results are not about the same questions and programs.

    Args:
        original: From `read_results`.
        conditions: From `run.conditions`, of the run that shall be compared.
        tasks: Keys of the tasks and groups of that run.
    """
    absent = [key for key in tasks if key not in original["dms"].get("tasks", {})]
    if absent:
        raise EvaluationError(
            f"--original: its results lack {', '.join(absent)}; evaluate the model again"
        )
    for key, values in conditions.items():
        for name, value in values.items():
            other = original["dms"].get(key, {}).get(name)
            if other != value:
                raise EvaluationError(
                    f"--original: its {name} ({key}) was {other}, here it is {value}; use the same "
                    "settings or evaluate the model again"
                )


def compare(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    published: str | None,
    names: Collection[str],
) -> list[ComparedScore]:
    """Return every metric of some tasks, in the order of the results.

    Args:
        model: Results of the model.
        original: Results of the original; None compares with nothing.
        published: Name of a model in `published_scores`; None takes none.
        names: Tasks and groups to compare, `LoadedTasks.names`.
    """
    scores = []
    for task in filter(names.__contains__, model["results"]):
        for metric, value in model["results"][task].items():
            if not _is_score(metric, value):
                continue
            other = None if original is None else original["results"].get(task, {}).get(metric)
            scores.append(
                ComparedScore(
                    task=task,
                    metric=metric.removesuffix(",none"),
                    shots=model["n-shot"].get(task),
                    documents=_documents(model, task),
                    model=value,
                    original=other,
                    difference=_difference(model, original, task, metric),
                    published=_published(published, task, metric),
                )
            )
    return scores


def table(scores: list[ComparedScore]) -> str:
    """Return the scores as a Markdown table; columns without any entry are left out."""
    rows = [
        (
            score.task,
            score.metric,
            "" if score.shots is None else score.shots,
            score.documents,
            "" if score.original is None else f"{score.original:.4f}",
            f"{score.model:.4f}",
            "" if score.difference is None else str(score.difference),
            "; ".join(f"{each['value']:g} ({each['settings']})" for each in score.published),
        )
        for score in scores
    ]
    shown = [i for i in range(len(_HEADER)) if any(str(row[i]) for row in rows)]
    return markdown_table([_HEADER[i] for i in shown], [[row[i] for i in shown] for row in rows])


def write(scores: list[ComparedScore], folder: Path) -> None:
    """Write `comparison.json`, a list with the fields of `ComparedScore`, and `comparison.md`."""
    rows = json.dumps([asdict(score) for score in scores], indent=1)
    (folder / "comparison.json").write_text(f"{rows}\n", encoding="utf-8")
    (folder / "comparison.md").write_text(f"{table(scores)}\n", encoding="utf-8")


def _is_score(metric: str, value: Any) -> bool:
    return isinstance(value, float | int) and "_stderr," not in metric and "," in metric


def _documents(results: Mapping[str, Any], task: str) -> int:
    """Return the number of documents of a task or of all tasks of a group."""
    counts = results["n-samples"]
    if task in counts:
        return int(counts[task]["effective"])
    children = results.get("group_subtasks", {}).get(task, [])
    return sum(_documents(results, child) for child in children)


def _difference(
    model: Mapping[str, Any], original: Mapping[str, Any] | None, task: str, metric: str
) -> Estimate | None:
    if original is None or task not in original["results"]:
        return None
    pairs = [_by_document(each, task, metric) for each in (model, original)]
    if not pairs[0] or set(pairs[0]) != set(pairs[1]):
        return None
    parts = [pairs[0][key] - pairs[1][key] for key in sorted(pairs[0])]
    return ratio(parts, [1.0] * len(parts))


def _by_document(
    results: Mapping[str, Any], task: str, metric: str
) -> dict[tuple[str, int], float]:
    """Return the values whose mean a metric is, by task and document; empty for other metrics."""
    name, _, filtered = metric.partition(",")
    values = {
        (part, int(sample["doc_id"])): float(sample[name])
        for part in _parts(results, task)
        for sample in results["samples"].get(part, [])
        if sample.get("filter", "none") == filtered and isinstance(sample.get(name), float | int)
    }
    mean = sum(values.values()) / max(1, len(values))
    stated = results["results"][task].get(metric, math.nan)
    return values if math.isclose(mean, stated, rel_tol=1e-6, abs_tol=1e-9) else {}


def _parts(results: Mapping[str, Any], task: str) -> list[str]:
    """Return the tasks of a group and of the groups in it, or the task itself."""
    children = results.get("group_subtasks", {}).get(task, [])
    return [part for child in children for part in _parts(results, child)] or [task]


def _published(name: str | None, task: str, metric: str) -> list[dict[str, Any]]:
    if name is None:
        return []
    return [
        each
        for each in published_scores()[name]
        if each["task"] == task.partition("@")[0]
        and each["metric"] in (metric, metric.removesuffix(",none"))
    ]
