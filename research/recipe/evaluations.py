"""Steps that evaluate the original and its exports."""

from __future__ import annotations

from pathlib import Path

from dms_train.cli.config_source import compose
from research.lab.steps import Step
from research.recipe.steps import (
    EVALUATE,
    ORIGINAL,
    Settings,
    Task,
    exports,
    overrides,
    training_steps,
)

_VALIDATE = ("-m", "dms_train.cli.validate")
_NEEDLES = ("-m", "research", "recipe-needles")


def steps(settings: Settings) -> list[Step]:
    """Return all steps of a recipe; each follows those that it needs."""
    models = {ORIGINAL: settings.original} | exports(settings)
    return [
        *training_steps(settings),
        *(_validation(settings, name) for name in exports(settings)),
        *_benchmarks(settings),
        *(_tasks(settings, name, model) for name, model in models.items() if settings.recipe.tasks),
        *(
            _perplexity(settings, name, model)
            for name, model in models.items()
            if settings.held_out
        ),
        *(_needles(settings, name, model) for name, model in models.items() if settings.haystack),
    ]


def _validation(settings: Settings, name: str) -> Step:
    """Return the step that compares an export with the original on the model's own text."""
    config = compose(overrides(settings))
    words = [
        *(*_VALIDATE, str(exports(settings)[name]), "--teacher", str(settings.original)),
        *("--data", str(settings.root / "data" / "sampled"), "--split", config.data.split),
        *("--seq-length", str(config.data.seq_length), "--samples", str(settings.recipe.samples)),
        *("--device", settings.device, "--output", str(settings.root / "validation" / name)),
    ]
    return Step(name=f"validate_{name}", words=lambda: words, needs=("train",))


def _benchmarks(settings: Settings) -> list[Step]:
    """Return the step that downloads the documents of the tasks, unless they are there."""
    if settings.benchmarks is not None or not settings.recipe.tasks:
        return []
    words = [*EVALUATE, "data", "--out", str(_documents(settings))]
    return [Step(name="benchmarks", words=lambda: words)]


def _documents(settings: Settings) -> Path:
    return settings.benchmarks or settings.root / "benchmarks"


def results(settings: Settings, name: str) -> Path:
    """Return the folder of a model's results on all tasks."""
    return settings.root / "eval" / name


def _tasks(settings: Settings, name: str, model: Path) -> Step:
    """Return the step that evaluates a model on all tasks, beside the results of the original."""
    words = [
        *(*EVALUATE, "harness", str(model)),
        *("--tasks", ",".join(_limited(settings, task) for task in settings.recipe.tasks)),
        *("--data", str(_documents(settings)), "--limit", str(settings.limit)),
        *("--device", settings.device, "--max-num-seqs", str(settings.rows)),
        *("--output", str(results(settings, name))),
        "--log-samples",  # for the intervals of differences
    ]
    if settings.recipe.published is not None:
        words += ["--published", settings.recipe.published]
    needs = ["train", *(step.name for step in _benchmarks(settings))]
    if name != ORIGINAL:
        words += ["--original", str(results(settings, ORIGINAL))]
        needs.append(f"evaluate_{ORIGINAL}")
    return Step(name=f"evaluate_{name}", words=lambda: words, needs=tuple(needs))


def _limited(settings: Settings, task: Task) -> str:
    return task.key if task.limit is None else f"{task.key}:{min(task.limit, settings.limit)}"


def perplexity_file(settings: Settings, name: str) -> Path:
    """Return the file with the perplexity of a model."""
    return settings.root / "perplexity" / f"{name}.json"


def _perplexity(settings: Settings, name: str, model: Path) -> Step:
    words = [
        *(*EVALUATE, "perplexity", str(model), "--text", str(settings.held_out)),
        *("--device", settings.device, "--output", str(perplexity_file(settings, name))),
    ]
    return Step(name=f"perplexity_{name}", words=lambda: words, needs=("train",))


def needle_contexts(settings: Settings) -> tuple[int, ...]:
    """Return the lengths of prompts with needles; none without a text for them."""
    return settings.recipe.contexts if settings.haystack else ()


def needles_folder(settings: Settings, name: str, context: int) -> Path:
    """Return the folder with the results of a model on prompts of this length."""
    return settings.root / "needles" / name / str(context)


def _needles(settings: Settings, name: str, model: Path) -> Step:
    """Return the step that looks for needles in prompts of each length."""
    words = [
        *(*_NEEDLES, str(settings.root / "needles" / name)),
        *("--contexts", ",".join(map(str, needle_contexts(settings)))),
        *(f"model.path={model}", f"model.device={settings.device}"),
        *(f"task.haystack={settings.haystack}", "task.count=100"),
        f"model.max_num_seqs={min(settings.rows, 32)}",
    ]
    return Step(name=f"needles_{name}", words=lambda: words, needs=("train",))
