"""Steps that evaluate the original and its exports."""

from __future__ import annotations

from pathlib import Path

from dms_train.cli.config_source import compose
from research.lab.step import Step
from research.recipe.chains import chain_steps
from research.recipe.seconds import seconds_steps
from research.recipe.steps import (
    EVALUATE,
    NEEDLES,
    Model,
    Settings,
    Task,
    documents,
    exports,
    models,
    training_steps,
    trainings,
)

_VALIDATE = ("-m", "dms_train.cli.validate")


def steps(settings: Settings) -> list[Step]:
    """Return all steps of a recipe; each follows those that it needs."""
    evaluated = models(settings)
    tasks = [_tasks(settings, model) for model in evaluated if settings.recipe.tasks]
    made = [
        *training_steps(settings),
        *tasks[:1],
        *(_validation(settings, name, export) for name, export in exports(settings).items()),
        *(_perplexity(settings, model) for model in evaluated if settings.held_out),
        *(_needles(settings, model) for model in evaluated if settings.haystack),
        *tasks[1:],
        *chain_steps(settings),
    ]
    return [*made, *seconds_steps(settings, [step.name for step in made])]


def _validation(settings: Settings, name: str, export: Path) -> Step:
    """Return the step that compares an export with the original on the model's own text."""
    config = compose(trainings(settings)["train"])
    words = [
        *(*_VALIDATE, str(export), "--teacher", str(settings.original)),
        *("--data", str(settings.root / "data" / "sampled"), "--split", config.data.split),
        *("--seq-length", str(config.data.seq_length), "--samples", str(settings.recipe.samples)),
        *("--device", settings.device, "--output", str(settings.root / "validation" / name)),
        *_limited_cache(settings, "--cache-bytes"),
    ]
    return Step(name=f"validate_{name}", words=lambda: words, needs=_trained(settings))


def _trained(settings: Settings) -> tuple[str, ...]:
    """Return the names of the trainings, which share the GPU with no evaluation."""
    return tuple(trainings(settings))


def _limited_cache(settings: Settings, option: str) -> list[str]:
    """Return the option that lets several evaluations share a GPU."""
    return [] if settings.cache_bytes is None else [f"{option}={settings.cache_bytes}"]


def _engine(settings: Settings, model: Model) -> list[str]:
    """Return the options of the engine."""
    words = ["--device", settings.device, *_limited_cache(settings, "--cache-bytes")]
    if model.policy != "auto":
        words += ["--policy", model.policy]
    return [*words, *(word for option in model.options for word in ("--policy-option", option))]


def results(settings: Settings, name: str) -> Path:
    """Return the folder of a model's results on all tasks."""
    return settings.root / "eval" / name


def _tasks(settings: Settings, model: Model) -> Step:
    """Return the step that evaluates a model on all tasks."""
    words = [
        *(*EVALUATE, "harness", str(model.path)),
        *("--tasks", ",".join(limited(task, settings.limit) for task in settings.recipe.tasks)),
        *("--data", str(documents(settings)), "--limit", str(settings.limit)),
        *(*_engine(settings, model), "--max-num-seqs", str(settings.rows)),
        *("--output", str(results(settings, model.name))),
        "--log-samples",  # for the intervals of differences, which the report computes
    ]
    if settings.recipe.published is not None:
        words += ["--published", settings.recipe.published]
    return Step(name=f"evaluate_{model.name}", words=lambda: words, needs=_trained(settings))


def limited(task: Task, most: int) -> str:
    """Return the name of a task for `dms-eval harness`, with its own limit, at most `most`."""
    return task.key if task.limit is None else f"{task.key}:{min(task.limit, most)}"


def perplexity_file(settings: Settings, name: str) -> Path:
    """Return the file with the perplexity of a model."""
    return settings.root / "perplexity" / f"{name}.json"


def _perplexity(settings: Settings, model: Model) -> Step:
    words = [
        *(*EVALUATE, "perplexity", str(model.path), "--text", str(settings.held_out)),
        *(*_engine(settings, model), "--output", str(perplexity_file(settings, model.name))),
    ]
    return Step(name=f"perplexity_{model.name}", words=lambda: words, needs=_trained(settings))


def needle_contexts(settings: Settings) -> tuple[int, ...]:
    """Return the lengths of prompts with needles; none without a text for them."""
    return settings.recipe.contexts if settings.haystack else ()


def needles_folder(settings: Settings, name: str, context: int) -> Path:
    """Return the folder with the results of a model on prompts of this length."""
    return settings.root / "needles" / name / str(context)


def _needles(settings: Settings, model: Model) -> Step:
    """Return the step that looks for needles in prompts of each length."""
    words = [
        *(*NEEDLES, str(settings.root / "needles" / model.name)),
        *("--contexts", ",".join(map(str, needle_contexts(settings)))),
        *(f"model.path={model.path}", f"model.device={settings.device}", f"policy={model.policy}"),
        *(f"policy.{option}" for option in model.options),
        *_limited_cache(settings, "model.cache_bytes"),
        *(f"task.haystack={settings.haystack}", f"task.count={settings.recipe.needles}"),
        f"model.max_num_seqs={min(settings.rows, 32)}",
    ]
    return Step(name=f"needles_{model.name}", words=lambda: words, needs=_trained(settings))
