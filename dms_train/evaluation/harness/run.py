"""Tasks of lm-evaluation-harness on the inference engine, and their results as files."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lm_eval import simple_evaluate, utils
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable
from torch import Tensor

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.comparison import read_results
from dms_train.evaluation.harness.loading import HarnessOptions, LoadedTask, LoadedTasks
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
_SAME_RESULTS = {"max_num_seqs", "max_num_batched_tokens"}  # with any value
_SAME_RESULTS |= {"cache_bytes", "gpu_memory_utilization"}
RESULTS = "results.json"


def facts(
    model: str,
    engine_options: EngineOptions,
    tasks: LoadedTasks,
    options: HarnessOptions,
    *,
    samples: bool,
) -> dict[str, Any]:
    """Return what the results of an evaluation depend on, as plain JSON.

    Args:
        model: Directory or hub id (local cache only).
        engine_options: Engine options.
        tasks: From `load_tasks`.
        options: Tasks, and how they are asked.
        samples: Also write prompts, answers and scores of every document.
    """
    stated = {
        "model": model,
        "model_sha256": model_hash(resolve(model)),
        "engine": asdict(engine_options),
        "log_samples": samples,
        **conditions(tasks, options),
    }
    plain: dict[str, Any] = json.loads(json.dumps(stated, default=handle_non_serializable))
    return plain


def conditions(tasks: LoadedTasks, options: HarnessOptions) -> dict[str, dict[str, Any]]:
    """Return what two runs must have in common to be compared, as plain JSON."""
    names = ("gen_kwargs", "system_instruction", "apply_chat_template", "prompt_end", "seed")
    return {
        "settings": {name: getattr(options, name) for name in names},
        "tasks": {
            task.key: {
                "num_fewshot": task.num_fewshot,
                "limit": task.limit,
                "sha256": task.sha256(tasks.definitions),
            }
            for task in tasks.tasks
        },
        "definitions": tasks.definitions,
        "versions": {name: _version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    }


def finished_results(folder: Path, stated: Mapping[str, Any], tasks: LoadedTasks) -> dict[str, Any]:
    """Read the results of finished tasks of the same evaluation; return {} if there are none.

    Args:
        folder: Output folder.
        stated: From `facts`.
        tasks: From `load_tasks`.

    Raises:
        EvaluationError: The folder has results of another model, or with other settings, or those
            of a group that has a task in common with another one of `tasks`.
    """
    if not (folder / RESULTS).exists():
        return {}
    results = read_results(folder)
    earlier = results.get("dms", {})
    if changed := _changed(earlier, stated):
        raise EvaluationError(
            f"{folder}: holds results already, with another {changed}; choose another --output, or "
            "replace them with --overwrite"
        )
    names = results["results"].keys() | results.get("group_subtasks", {}).keys()
    for task in tasks.tasks:
        if task.key not in earlier["tasks"] and (both := sorted(task.names & names)):
            raise EvaluationError(
                f"--tasks: {both[0]} is also part of the results in {folder}; use "
                f"{task.key.partition('@')[0]}@SHOTS or another --output"
            )
    return results


def _changed(earlier: Mapping[str, Any], stated: Mapping[str, Any]) -> str | None:
    """Return the name of the first difference that changes results."""
    for block in ("model_sha256", "log_samples"):
        if earlier.get(block) != stated[block]:
            return block
    for block in ("engine", "settings", "tasks", "definitions", "versions"):
        for name in sorted(stated[block].keys() & earlier[block].keys() - _SAME_RESULTS):
            if earlier[block][name] != stated[block][name]:
                return f"{name} ({block})"
    return None


def evaluate(
    engine_options: EngineOptions,
    tasks: LoadedTasks,
    options: HarnessOptions,
    stated: Mapping[str, Any],
    finished: Mapping[str, Any],
) -> Iterator[tuple[LoadedTask, dict[str, Any]]]:
    """Evaluate tasks one after the other; yield each with the results so far.

    Results have the form of lm-evaluation-harness and a block `dms`, whose `tasks` are finished.

    Args:
        engine_options: Engine options.
        tasks: From `load_tasks`.
        options: Tasks, and how they are asked.
        stated: From `facts`, with the model.
        finished: From `finished_results`; these tasks are not evaluated again.

    Raises:
        EvaluationError: The model has no tokenizer, or a request cannot be answered.
        InferenceError: The model or an option of the engine cannot be used.
    """
    started = time.monotonic()
    results, earlier = dict(finished), finished.get("dms", {})
    dms = {"kv_by_task": {}, **earlier, **stated, "tasks": dict(earlier.get("tasks", {}))}
    waiting = [task for task in tasks.tasks if task.key not in dms["tasks"]]
    if not waiting:
        return
    dms["definitions"] = earlier.get("definitions", {}) | stated["definitions"]
    lm = EngineLM(
        stated["model"],
        engine_options,
        seed=options.seed,
        examples_only=options.prompt_end == "examples",
    )
    for task in waiting:
        before, lm.peaks = lm.engine.kv, PeakTokens()
        _merge(results, _evaluate_task(lm, task, options))
        after = lm.engine.kv
        if after is not None:
            dms["kv_by_task"][task.key] = cost_between(before, after) | _peak_tokens(lm.peaks)
            total = total_cost(list(dms["kv_by_task"].values()))
            dms["kv"] = total | _memory(lm.engine, after, earlier.get("kv", {}))
        dms["seconds"] = earlier.get("seconds", 0.0) + time.monotonic() - started
        dms["tasks"][task.key] = stated["tasks"][task.key]
        results["dms"] = dms
        yield task, results


def _evaluate_task(lm: EngineLM, task: LoadedTask, options: HarnessOptions) -> dict[str, Any]:
    """Return the harness' results for one task or group, with the suffix in all names."""
    limit = task.limit
    with _templates_compiled_once():
        results: dict[str, Any] = simple_evaluate(
            model=lm,
            tasks=[task.item],
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=task.num_fewshot,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            gen_kwargs=options.gen_kwargs,
            system_instruction=options.system_instruction,
            apply_chat_template=options.apply_chat_template,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    for block in set(_BY_TASK) & results.keys():
        results[block] = {f"{key}{task.suffix}": value for key, value in results[block].items()}
    for key, children in results.get("group_subtasks", {}).items():
        results["group_subtasks"][key] = [f"{child}{task.suffix}" for child in children]
    return results


def _templates_compiled_once() -> AbstractContextManager[Any]:
    """Compile each template of the harness once; it would do so for each example of a prompt."""
    return patch.object(utils.env, "from_string", functools.cache(utils.env.from_string))


def _merge(results: dict[str, Any], further: dict[str, Any]) -> None:
    """Add the results of further tasks to those so far."""
    for key, value in further.items():
        if key in _BY_TASK and key in results:
            results[key].update(value)
        else:
            results[key] = value


def write_results(results: dict[str, Any], folder: Path, samples_of: Collection[str]) -> None:
    """Write `results.json`, and the samples of some tasks as JSON lines.

    Args:
        results: From `evaluate`; files of fewer tasks are replaced.
        folder: Output folder; created if absent.
        samples_of: Tasks whose prompts, answers and scores of every document are written too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for task in results["samples"].keys() & samples_of:
        rows = results["samples"][task]
        lines = (json.dumps(row, default=handle_non_serializable) for row in rows)
        _write(folder / f"samples_{task}.jsonl", "".join(f"{line}\n" for line in lines))
    results = {name: value for name, value in results.items() if name != "samples"}
    text = json.dumps(results, indent=1, default=handle_non_serializable)
    _write(folder / RESULTS, text + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file that is whole or absent after a crash."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def cost_between(before: TotalKV | None, after: TotalKV) -> dict[str, Any]:
    """Return the cost of the requests between two reports of an engine.

    `cr_factor` is tokens seen over tokens held when requests finished, as in `TotalKV`.
    """
    sums = {name: getattr(after, name) for name in _SUMS}
    held = after.tokens / after.cr_factors
    if before is not None:
        sums = {name: value - getattr(before, name) for name, value in sums.items()}
        held = held - before.tokens / before.cr_factors
    return _factors(sums, held)


def total_cost(costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cost of all tasks together.

    Args:
        costs: Entries of `kv_by_task`.
    """
    sums = {name: sum(cost[name] for cost in costs) for name in _SUMS}
    held = sum(cost["tokens"] / torch.tensor(cost["cr_factors"]).double() for cost in costs)
    requests = max(1, sums["requests"])
    return {
        **_factors(sums, held),
        "peak_tokens": sum(cost["peak_tokens"] * cost["requests"] for cost in costs) / requests,
        "peak_tokens_max": max(cost["peak_tokens_max"] for cost in costs),
    }


def _factors(sums: dict[str, Any], held: Tensor) -> dict[str, Any]:
    """Return sums over requests with the compression ratios; `held` are tokens, [l, h]."""
    factors = sums["tokens"] / held
    cr_factor = 1.0 / (1.0 / factors).mean().item()
    return {**sums, "cr_factor": cr_factor, "cr_factors": factors.tolist()}


def _peak_tokens(peaks: PeakTokens) -> dict[str, float]:
    """Return mean and maximum over requests; tokens are means over layers and KV heads."""
    return {"peak_tokens": peaks.total / max(1, peaks.requests), "peak_tokens_max": peaks.most}


def _memory(engine: InferenceEngine, total: TotalKV, earlier: Mapping[str, Any]) -> dict[str, int]:
    """Return what concurrent requests held together, including an earlier part of the run."""
    names = ("peak_live_bytes", "peak_allocated_bytes")
    peaks = {name: max(getattr(total, name), earlier.get(name, 0)) for name in names}
    return {**peaks, "preemptions": engine.preemptions + earlier.get("preemptions", 0)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
