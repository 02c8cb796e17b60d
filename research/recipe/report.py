"""Report of a recipe: every model on every task, and the model cards of its exports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dms_train.export.card import add_evaluation
from dms_train.tables import markdown_table
from research.recipe.chains import chains_text
from research.recipe.figures import CHAIN_FIGURES, chain_tasks, seconds_tasks, write_figures
from research.recipe.measured import measured
from research.recipe.seconds import seconds_text
from research.recipe.steps import Settings, exports

_VALIDATED = {"cr_factor": "cr_factor", "kl_nats_per_token": "KL", "top1_agreement": "top-1"}
_NOTES = """\
`cr_factor`, `KL` (nats per token) and `top-1` compare an export with the original on text of the
original that was not trained on. `cr_factor, continuations` is that of the tokens whose perplexity
is measured after a prompt, and `nats more` is what such a token loses beside the original, paired
over windows, with a 95% interval. `cr_factor, tasks` and `peak tokens` are those of the benchmarks;
peak tokens are the mean over requests of the most tokens that a layer and KV head holds. Scores
have 95% intervals; `choices` is the mean over the tasks of multiple choice, each with the same
weight. Its difference to the original is paired over documents, with a 95% interval.
"""
_POLICY_NOTE = """\
Rows such as `h2o_cr4` are the original with a cache policy. Its budget is the length of each
request, the prompt with the longest possible answer, divided by the ratio; a longer prompt has a
larger budget. Policies that evict at the end of a prompt read all of it until then. `quest` keeps
all tokens, and a generated token reads a share of them.
"""


def write_report(settings: Settings) -> Path:
    """Write `report.md`, its numbers, and the results of each export to its model card.

    Parts that have not finished are left out; a model card is written when its validation has.

    Returns:
        The report; `report.json` and the figures are beside it.
    """
    numbers = measured(settings)
    table = models_table(numbers)
    named = {model["name"]: model for model in numbers["models"]}
    for name, export in exports(settings).items():
        if "validation" in named[name]:
            add_evaluation(export, named[name]["validation"], table)
    write_figures(numbers, settings.root)
    (settings.root / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    report = settings.root / "report.md"
    report.write_text(report_text(numbers), encoding="utf-8")
    return report


def report_text(numbers: Mapping[str, Any]) -> str:
    """Return the report of the numbers of `report.json` as Markdown."""
    parts = [f"# {numbers['experiment']}"]
    if numbers.get("weights"):  # older records do not state them
        parts.append(f"Weights of the original: {numbers['weights']}.")
    if any(_is_compared(model) for model in numbers["models"]):
        parts += [models_table(numbers), _NOTES]
        if any(model["policy"] != "auto" for model in numbers["models"]):
            parts.append(_POLICY_NOTE)
    if numbers.get("published"):  # older records do not state them
        parts += ["## Published scores of the original", _published(numbers["published"])]
    parts += ["## Training", _trainings(numbers["trainings"])]
    if numbers.get("chains", {}).get("points"):  # records before 2026-11-27 have none
        parts += ["## Chains of reasoning", chains_text(numbers["chains"])]
        for cost, file in CHAIN_FIGURES.items():
            title = f"accuracy against {cost.title}"
            named = chain_tasks(numbers, cost)
            parts += [f"![{name}: {title}]({file}_{name}.svg)" for name in named]
    if numbers.get("seconds"):  # older records have none
        parts += ["## Accuracy against seconds", seconds_text(numbers["seconds"])]
        named = seconds_tasks(numbers)
        parts += [f"![{name}: accuracy against seconds](seconds_{name}.svg)" for name in named]
    if numbers["needles"]:
        parts += ["## Needles by length and depth", "![Needles found](needles.svg)"]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _is_compared(model: Mapping[str, Any]) -> bool:
    """Return whether a model has numbers for `models_table`; chains and seconds have their own."""
    return any(model.get(part) for part in ("validation", "perplexity", "needles", "tasks"))


def models_table(numbers: Mapping[str, Any]) -> str:
    """Return a row for each model; columns that no model has are left out."""
    models = numbers["models"]
    tasks = list(dict.fromkeys(key for model in models for key in model.get("tasks", {})))
    contexts = list(dict.fromkeys(key for model in models for key in model["needles"]))
    rows = [{"model": model["name"], **_row(model, tasks, contexts)} for model in models]
    header = [column for column in rows[0] if any(row[column] != "-" for row in rows)]
    return markdown_table(header, [[row[column] for column in header] for row in rows])


def _row(model: Mapping[str, Any], tasks: Sequence[str], contexts: Sequence[str]) -> dict[str, str]:
    validation, kv, needles = model.get("validation", {}), model.get("kv", {}), model["needles"]
    perplexity, choices = model.get("perplexity", {}), model.get("choices") or {}
    continuation = perplexity.get("continuation", {})
    longest = needles.get(contexts[-1], {}) if contexts else {}
    return {
        **{label: _number(validation.get(key), ".4g") for key, label in _VALIDATED.items()},
        "cr_factor, tasks": _number(kv.get("cr_factor"), ".2f"),
        "peak tokens": _number(kv.get("peak_tokens"), ",.0f"),
        "perplexity": _number(perplexity.get("window", {}).get("perplexity"), ".2f"),
        "of continuations": _number(continuation.get("perplexity"), ".2f"),
        "nats more": interval(continuation.get("difference"), "+.4f"),
        "cr_factor, continuations": _number(continuation.get("cr_factor"), ".2f"),
        **{f"needles {int(key):,}": interval(needles.get(key)) for key in contexts},
        "KV reads of a token, longest needles": _number(longest.get("reads_per_token"), ",.0f"),
        **{key: _score(model.get("tasks", {}).get(key)) for key in tasks},
        "choices": _number(choices.get("score"), ".3f"),
        "difference": interval(choices.get("difference"), "+.3f"),
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def interval(estimate: Mapping[str, float] | None, form: str = ".3f") -> str:
    """Show an estimate with its interval as VALUE [LOW, HIGH]; a dash if there is none."""
    if estimate is None:
        return "-"
    value, low, high = (format(estimate[name], form) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "-"
    width = score["half_width"]  # None of one document
    return f"{score['score']:.3f}" + ("" if width is None else f" +- {width:.3f}")


def _published(scores: Sequence[Mapping[str, Any]]) -> str:
    columns = ("task", "metric", "value", "settings", "source")
    return markdown_table(columns, [[str(score[name]) for name in columns] for score in scores])


def _trainings(trainings: Mapping[str, Mapping[str, float]]) -> str:
    columns = {
        "steps": ("steps", ",d"),
        "tokens": ("tokens", ",d"),
        "minutes of these steps": ("minutes", ".1f"),
        "tokens of exports on the way": ("tokens_of_held_exports", ",d"),
    }
    rows = [
        [name, *(_number(run[key], form) for key, form in columns.values())]
        for name, run in trainings.items()
    ]
    return markdown_table(["run", *columns], rows)
