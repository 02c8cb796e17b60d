"""Steps of reasoning with several chains: accuracy against the cost of the cache."""

from __future__ import annotations

from pathlib import Path

from research.lab.steps import Step
from research.recipe.steps import EVALUATE, ORIGINAL, Model, Settings, documents, exports, trainings

_LENGTHS = (0.5, 1, 2)  # in units of 1,024 tokens
_WIDTHS = (1, 2, 4, 8, 16)
_RATIOS = (4, 8)
_SAMPLING = ("sampling.temperature=0.7", "sampling.top_p=0.95")
_FILES = {
    "gsm8k": "openai/gsm8k/main/test.jsonl",
    "math500": "HuggingFaceH4/MATH-500/default/test.jsonl",
    "humaneval": "openai/openai_humaneval/test.jsonl",
}
_RUNS_PROGRAMS = "humaneval"


def chain_steps(settings: Settings) -> list[Step]:
    """Return the steps that sample chains from the original and its exports, and their report."""
    if not settings.recipe.chains:
        return []
    models = [Model(ORIGINAL, settings.original)]
    models += [
        Model(name, path)
        for name, path in exports(settings).items()
        if name in {f"cr{ratio}" for ratio in _RATIOS}
    ]
    runs = [_run(settings, model, task) for model in models for task in _tasks(settings)]
    root = settings.root / "chains"
    words = [*EVALUATE, "report", str(root), "--output", str(settings.root / "chains.html")]
    needs = tuple(step.name for step in runs)
    return [*runs, Step(name="chains_report", words=lambda: words, needs=needs)]


def _tasks(settings: Settings) -> list[str]:
    """Return the tasks; the one that runs programs only if that is allowed."""
    return [name for name in _FILES if name != _RUNS_PROGRAMS or settings.allow_code]


def _run(settings: Settings, model: Model, task: str) -> Step:
    words = [
        *(*EVALUATE, f"model.path={model.path}", f"model.device={settings.device}"),
        *(f"task.name={task}", f"task.path={documents(settings) / _FILES[task]}"),
        *(f"task.limit={settings.limit}", f"model.max_num_seqs={settings.rows}"),
        f"sweep.lengths=[{','.join(map(str, _LENGTHS))}]",
        f"sweep.widths=[{','.join(map(str, _WIDTHS))}]",
        *_SAMPLING,
        f"run.dir={_folder(settings, model.name, task)}",
    ]
    if settings.cache_bytes is not None:
        words.append(f"model.cache_bytes={settings.cache_bytes}")
    if task == _RUNS_PROGRAMS:
        words.append(f"run.allow_code={settings.allow_code}")
    name = f"chains_{task}_{model.name}"
    return Step(name=name, words=lambda: words, needs=tuple(trainings(settings)))


def _folder(settings: Settings, name: str, task: str) -> Path:
    return settings.root / "chains" / task / name
