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
from typing import Any, NamedTuple

import datasets
from huggingface_hub import constants
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.local_data import local_definitions
from dms_train.evaluation.harness.model import EngineLM, PeakTokens
from dms_train.evaluation.scaling.run import model_hash
from dms_train.hf.directory import resolve
from dms_train.inference.accounting import TotalKV
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions

_PACKAGES = ("dms-train", "lm-eval", "torch", "transformers", "tokenizers", "datasets")
_SUMS = ("requests", "tokens", "kv_reads", "prefill_reads")
_BY_TASK = (  # blocks of the harness' results with an entry for each task or group
    *("results", "groups", "group_subtasks", "configs", "versions", "n-shot"),
    *("higher_is_better", "n-samples", "samples"),
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
        data: Folder of data files that tasks read instead of the hub's; see `local_data`.
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
    data: Path | None = None
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
        raise EvaluationError(
            f"{folder}: holds results already; choose another --output, or "
            "replace them with --overwrite"
        )


class LoadedTasks(NamedTuple):
    """Tasks with their data.

    Attributes:
        items: Tasks and groups in the order of the options.
        definitions: For each task that reads local files: its definition, files and changes.
    """

    items: list[Any]
    definitions: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the tasks and groups."""
        return [getattr(item, "task_name", None) or item.name for item in self.items]


def load_tasks(options: HarnessOptions) -> LoadedTasks:
    """Load the tasks and groups with their data, from this machine unless `download`.

    Raises:
        EvaluationError: A task is not known or not supported, or its data set is not there.
    """
    manager, names = _manager(options), dict.fromkeys(options.tasks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_network(allowed=options.download))
        local: dict[str, Any] = {}
        if options.data is not None:
            definitions = local_definitions(manager.task_index, options.data)
            local = stack.enter_context(definitions)
        entries = [_load(manager, name, download=options.download) for name in names]
    items = [item for entry in entries for item in _top_level(entry)]
    loaded = {name for entry in entries for name in entry["tasks"]}
    return LoadedTasks(items, {name: local[name] for name in sorted(loaded & set(local))})


def _top_level(entry: dict[str, Any]) -> list[Any]:
    """Return the outermost groups of a name, or its tasks; refuse tasks that run programs."""
    for key, task in entry["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise EvaluationError(
                f"task {key}: runs programs that the model wrote without limits; use "
                "dms-eval task.name=humaneval (or livecodebench) --allow-code for programs"
            )
    groups = entry.get("groups", {})
    nested = {child for group in groups.values() for child in group.child_names}
    return [group for key, group in groups.items() if key not in nested] or list(
        entry["tasks"].values()
    )


def evaluate(
    model: str, engine_options: EngineOptions, tasks: LoadedTasks, options: HarnessOptions
) -> Iterator[dict[str, Any]]:
    """Evaluate tasks one after the other; yield the results so far after each.

    Results have the form of lm-evaluation-harness and a block `dms`.

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
    results: dict[str, Any] = {}
    dms: dict[str, Any] = {
        "model": model,
        "model_sha256": model_hash(directory),
        "engine": asdict(engine_options),
        **conditions(tasks, options),
        "kv_by_task": {},
    }
    peaks: list[PeakTokens] = []
    for name, item in zip(tasks.names, tasks.items, strict=True):
        before, lm.peaks = lm.engine.kv, PeakTokens()
        _merge(results, _evaluate_item(lm, item, options))
        peaks.append(lm.peaks)
        after = lm.engine.kv
        if after is not None:
            dms["kv_by_task"][name] = cost_between(before, after) | _peak_tokens(peaks[-1:])
            dms["kv"] = cost_between(None, after) | _peak_tokens(peaks) | _memory(lm.engine, after)
        dms["seconds"] = time.monotonic() - started
        results["dms"] = dms
        yield results


def conditions(tasks: LoadedTasks, options: HarnessOptions) -> dict[str, dict[str, Any]]:
    """Return what two runs must have in common to be compared, as plain JSON."""
    names = ("num_fewshot", "limit", "gen_kwargs", "system_instruction", "apply_chat_template")
    return {
        "settings": {name: getattr(options, name) for name in (*names, "seed")},
        "definitions": tasks.definitions,
        "versions": {name: _version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    }


def _evaluate_item(lm: EngineLM, item: Any, options: HarnessOptions) -> dict[str, Any]:
    """Return the harness' results for one task or group."""
    limit = options.limit
    results: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=[item],
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
    return results


def _merge(results: dict[str, Any], further: dict[str, Any]) -> None:
    """Add the results of further tasks to those so far."""
    for key, value in further.items():
        if key in _BY_TASK and key in results:
            results[key].update(value)
        else:
            results[key] = value


def write_results(results: dict[str, Any], folder: Path, *, samples: bool) -> None:
    """Write `results.json`, and the samples of each task as JSON lines if asked for.

    Args:
        results: From `evaluate`; files of fewer tasks are replaced.
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
    except ModuleNotFoundError as error:
        raise EvaluationError(
            f"task {name}: needs the package {error.name}; install it, pip install {error.name}"
        ) from None
    except Exception as error:  # errors of the hub, of data sets, of the task's own code
        reason = " ".join(str(error).split())[:200]
        hint = "" if download else "; --download fetches its data set where it is not on this disk"
        raise EvaluationError(f"task {name}: {reason}{hint}") from None
    return loaded


def cost_between(before: TotalKV | None, after: TotalKV) -> dict[str, Any]:
    """Return the cost of the requests between two reports of an engine.

    `cr_factor` is tokens seen over tokens held when requests finished, as in `TotalKV`.
    """
    sums = {name: getattr(after, name) for name in _SUMS}
    held = after.tokens / after.cr_factors
    if before is not None:
        sums = {name: value - getattr(before, name) for name, value in sums.items()}
        held = held - before.tokens / before.cr_factors
    factors = sums["tokens"] / held
    cr_factor = 1.0 / (1.0 / factors).mean().item()
    return {**sums, "cr_factor": cr_factor, "cr_factors": factors.tolist()}


def _peak_tokens(peaks: list[PeakTokens]) -> dict[str, float]:
    """Return mean and maximum over requests; tokens are means over layers and KV heads."""
    requests = sum(each.requests for each in peaks)
    return {
        "peak_tokens": sum(each.total for each in peaks) / max(1, requests),
        "peak_tokens_max": max(each.most for each in peaks),
    }


def _memory(engine: InferenceEngine, total: TotalKV) -> dict[str, int]:
    """Return what concurrent requests held together."""
    return {
        "peak_live_bytes": total.peak_live_bytes,
        "peak_allocated_bytes": total.peak_allocated_bytes,
        "preemptions": engine.preemptions,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
