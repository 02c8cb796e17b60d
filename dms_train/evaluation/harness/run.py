"""Tasks of lm-evaluation-harness on the inference engine, and their results as files."""

from __future__ import annotations

import contextlib
import difflib
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.model import EngineLM
from dms_train.evaluation.scaling.run import model_hash
from dms_train.hf.directory import resolve
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions

_PACKAGES = ("dms-train", "lm-eval", "torch", "transformers", "tokenizers", "datasets")
_COLUMNS = (
    *("requests", "tokens", "cr_factor", "kv_reads", "prefill_reads"),
    *("peak_live_tokens", "peak_live_bytes", "peak_allocated_bytes"),
)
RESULTS = "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """Tasks, and how they are asked.

    Attributes:
        tasks: Names of tasks, groups or tags, or paths of their YAML files.
        include_path: Folder with further YAML files.
        num_fewshot: Examples before each question; None takes the task's own.
        limit: Number of documents of each task, or a share below 1; None takes all.
        gen_kwargs: Changes of `generation_kwargs`, such as `temperature=0.7,do_sample=true`.
        system_instruction: Text before every prompt.
        apply_chat_template: Turn prompts into chats by the model's template.
        seed: Seed of the choice of examples and of sampled answers.
        download: Fetch data sets from the hub where they are absent.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    gen_kwargs: str | None = None
    system_instruction: str | None = None
    apply_chat_template: bool = False
    seed: int = 1234
    download: bool = False

    def __post_init__(self) -> None:
        if not self.tasks:
            raise EvaluationError("--tasks: give at least one")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise EvaluationError(f"--num-fewshot {self.num_fewshot}: 0 or more")
        if self.limit is not None and not (0 < self.limit < 1 or self.limit == int(self.limit) > 0):
            raise EvaluationError(f"--limit {self.limit:g}: whole documents, or a share below 1")


def require_unused(folder: Path) -> None:
    """Raise EvaluationError for a folder that holds results already."""
    if (folder / RESULTS).exists():
        raise EvaluationError(f"{folder}: holds results already; choose another --output")


def load_tasks(options: HarnessOptions) -> list[Any]:
    """Load the tasks and groups with their data, from this machine unless `download`.

    Raises:
        EvaluationError: A task is not known or not supported, or its data set is not there.
    """
    manager = _manager(options)
    loaded: list[Any] = []
    with _network(allowed=options.download):
        for name in dict.fromkeys(options.tasks):
            entry = _load(manager, name, download=options.download)
            groups = entry.get("groups", {})
            nested = {child for group in groups.values() for child in group.child_names}
            tops = [group for key, group in groups.items() if key not in nested]
            loaded += tops or list(entry["tasks"].values())
            for key, task in entry["tasks"].items():
                if getattr(task, "UNSAFE_CODE", False):
                    raise EvaluationError(
                        f"task {key}: runs programs that the model wrote without limits; use "
                        "dms-eval task.name=livecodebench --allow-code for programs"
                    )
    return loaded


def evaluate(
    model: str, engine_options: EngineOptions, tasks: list[Any], options: HarnessOptions
) -> dict[str, Any]:
    """Evaluate tasks; return results in the form of lm-evaluation-harness, with a block `dms`.

    Args:
        model: Directory or hub id (local cache only).
        engine_options: Engine options.
        tasks: From `load_tasks`.
        options: Tasks, and how they are asked.

    Raises:
        EvaluationError: The model has no tokenizer, or a request cannot be answered.
        InferenceError: The model or an option of the engine cannot be used.
    """
    started, directory = time.monotonic(), resolve(model)
    lm = EngineLM(model, engine_options, seed=options.seed)
    limit = options.limit
    results: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=options.num_fewshot,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        gen_kwargs=options.gen_kwargs,
        system_instruction=options.system_instruction,
        apply_chat_template=options.apply_chat_template,
        numpy_random_seed=options.seed,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    results["dms"] = {
        "model": model,
        "model_sha256": model_hash(directory),
        "engine": asdict(engine_options),
        "kv": _kv(lm.engine),
        "seconds": time.monotonic() - started,
        "versions": {name: _version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    }
    return results


def write_results(results: dict[str, Any], folder: Path, *, samples: bool) -> None:
    """Write `results.json`, and the samples of each task as JSON lines if asked for.

    Args:
        results: From `evaluate`.
        folder: Output folder; created if absent.
        samples: Also write prompts, answers and scores of every document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if samples:
        for task, rows in results["samples"].items():
            lines = (json.dumps(row, default=handle_non_serializable) for row in rows)
            (folder / f"samples_{task}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    results = {name: value for name, value in results.items() if name != "samples"}
    text = json.dumps(results, indent=1, default=handle_non_serializable)
    partial = folder / f"{RESULTS}.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    partial.rename(folder / RESULTS)


def table(results: dict[str, Any]) -> str:
    """Return the harness' tables of results, as Markdown."""
    tables: list[str] = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)


@contextlib.contextmanager
def _network(*, allowed: bool) -> Iterator[None]:
    """Keep data sets from being fetched inside, unless it is allowed."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not allowed:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _manager(options: HarnessOptions) -> Any:
    """Return a manager that knows the tasks of the options."""
    include = options.include_path
    if include is None:
        return TaskManager()
    if not include.is_dir():
        raise EvaluationError(f"--include-path {include}: no such folder")
    manager = TaskManager(include_path=str(include), include_defaults=False)
    if set(options.tasks) <= set(manager.all_subtasks):
        return manager
    return TaskManager(include_path=str(include))


def _load(manager: Any, name: str, *, download: bool) -> dict[str, Any]:
    known = name in manager.all_tasks or Path(name).is_file()
    if not known:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; see --include-path"
        raise EvaluationError(f"task {name}: lm-evaluation-harness has no such task{hint}")
    try:
        loaded: dict[str, Any] = manager.load([name])
    except Exception as error:  # errors of the hub, of data sets, of the task's own code
        reason = " ".join(str(error).split())[:200]
        hint = "" if download else "; --download fetches its data set where it is not on this disk"
        raise EvaluationError(f"task {name}: {reason}{hint}") from None
    return loaded


def _kv(engine: InferenceEngine) -> dict[str, Any] | None:
    total = engine.kv
    if total is None:
        return None
    numbers = {name: getattr(total, name) for name in _COLUMNS}
    return {**numbers, "cr_factors": total.cr_factors.tolist(), "preemptions": engine.preemptions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
