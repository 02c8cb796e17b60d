"""Reasoning with several chains: accuracy against the cost of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dms_train.evaluation.analysis.comparison import PEAK, READS, Comparison
from dms_train.evaluation.scaling.results import Point, RunResult, load
from dms_train.inference.policies.registry import AUTO
from dms_train.tables import markdown_table
from research.lab.step import Step
from research.recipe.steps import (
    CONTROL,
    EVALUATE,
    FILES,
    ORIGINAL,
    Model,
    Settings,
    documents,
    models,
    trainings,
)

_LENGTHS = (0.5, 1, 2)  # in units of 1,024 tokens
_WIDTHS = (1, 2, 4, 8, 16)
_RATIOS = (2, 4, 8)
_RUNS_PROGRAMS = "humaneval"
_WORKERS = 4  # processes of each evaluation that compare answers or run programs


def chain_steps(settings: Settings) -> list[Step]:
    """Return the steps that sample chains from each model, and the step that reports them."""
    if not settings.recipe.chains:
        return []
    trained = {ORIGINAL, CONTROL, *(f"cr{ratio}" for ratio in _RATIOS)}
    chosen = [m for m in models(settings) if m.name in trained or m.policy != AUTO]
    runs = [_run(settings, model, task) for model in chosen for task in permitted(settings, FILES)]
    root = settings.root / "chains"
    words = [*EVALUATE, "report", str(root), "--output", str(settings.root / "chains.html")]
    needs = tuple(step.name for step in runs)
    return [*runs, Step(name="chains_report", words=lambda: words, needs=needs)]


def permitted(settings: Settings, tasks: Iterable[str]) -> list[str]:
    """Return the tasks; the one that runs programs only if that is allowed."""
    return [name for name in tasks if name != _RUNS_PROGRAMS or settings.allow_code]


def asked(settings: Settings, task: str, limit: int) -> list[str]:
    """Return the options of `dms-eval` that ask the problems of a task as the training text did."""
    words = [
        "model.prompt_format=template",
        *(f"task.name={task}", f"task.path={documents(settings) / FILES[task]}"),
        *(f"task.limit={limit}", "sampling.temperature=0.7", "sampling.top_p=0.95"),
    ]
    if task == _RUNS_PROGRAMS:
        words.append(f"run.allow_code={settings.allow_code}")
    return words


def _run(settings: Settings, model: Model, task: str) -> Step:
    # the budget of a policy is a share of the longest answer
    lengths = _LENGTHS if model.policy == AUTO else _LENGTHS[-1:]
    words = [
        *(*EVALUATE, f"model.path={model.path}", f"model.device={settings.device}"),
        *(*asked(settings, task, settings.limit), f"model.max_num_seqs={settings.rows}"),
        *(f"policy={model.policy}", *(f"policy.{option}" for option in model.options)),
        f"sweep.lengths=[{','.join(map(str, lengths))}]",
        f"sweep.widths=[{','.join(map(str, _WIDTHS))}]",
        f"run.dir={_folder(settings, model.name, task)}",
        f"run.workers={_WORKERS}",
    ]
    if settings.cache_bytes is not None:
        words.append(f"model.cache_bytes={settings.cache_bytes}")
    name = f"chains_{task}_{model.name}"
    return Step(name=name, words=lambda: words, needs=tuple(trainings(settings)))


def _folder(settings: Settings, name: str, task: str) -> Path:
    return settings.root / "chains" / task / name


def measured_chains(settings: Settings) -> dict[str, Any]:
    """Return the points of all runs that have finished, and the margins of their frontiers.

    Margins compare the exports with the original. The control evicts nothing, and policies are
    sampled at one length: they have points only.
    """
    runs: dict[tuple[str, str], RunResult] = {}
    compared = []
    for task in FILES:
        for model in models(settings):
            folder = _folder(settings, model.name, task)
            if (folder / "summary.json").is_file():
                runs[task, model.name] = load([folder])
                if model.policy == AUTO and model.name != CONTROL:
                    compared.append(runs[task, model.name])
    comparison = Comparison(compared)
    return {
        "points": [
            {"task": task, "model": name, **_numbers(point)}
            for (task, name), run in runs.items()
            for point in run.points()
        ],
        "margins": [
            {"cost": cost.title, **margin._asdict()}
            for cost in (READS, PEAK)
            for margin in comparison.margins(cost)
        ],
    }


def _numbers(point: Point) -> dict[str, Any]:
    length, width, _ = point.budget
    return {"length": length, "chains": width} | {
        name: value for name, value in asdict(point).items() if name != "budget"
    }


def chains_text(numbers: Mapping[str, Any]) -> str:
    """Return the tables of `measured_chains` as Markdown."""
    points, margins = numbers["points"], numbers["margins"]
    longest = max(point["length"] for point in points)
    rows = [_point_row(point) for point in points if point["length"] == longest]
    parts = [
        f"Chains of at most {1024 * longest:,.0f} tokens; `accuracy` is that of all chains "
        "together, with a 95% interval, costs are those of a document:",
        _table(rows),
    ]
    if margins:  # none while one model has finished
        parts += [
            "Margins of Pareto frontiers over all lengths and widths, in accuracy points:",
            _table([_margin_row(margin) for margin in margins]),
        ]
    return "\n\n".join(parts)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def _point_row(point: Mapping[str, Any]) -> dict[str, str]:
    accuracy = point["accuracy"]
    low, high = (f"{100 * accuracy[end]:.1f}" for end in ("low", "high"))
    return {
        "task": point["task"],
        "model": point["model"],
        "chains": str(point["chains"]),
        "accuracy, %": f"{100 * accuracy['value']:.1f} [{low}, {high}]",
        "one chain, %": f"{100 * point['chain_accuracy']:.1f}",
        "KV reads": f"{point['kv_reads']:,.0f}",
        "peak tokens": f"{point['peak_tokens']:,.0f}",
        "documents": str(point["documents"]),
    }


def _margin_row(margin: Mapping[str, Any]) -> dict[str, str]:
    value, interval = margin["value"], margin["interval"]
    ends = "" if interval is None else f" [{interval[0]:.1f}, {interval[1]:.1f}]"
    return {
        "methods": f"{margin['first']} minus {margin['second']}",
        "task": margin["task"],
        "at equal": margin["cost"],
        "margin": "-" if value is None else f"{value:+.1f}{ends}",
    }
