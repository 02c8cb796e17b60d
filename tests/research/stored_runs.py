"""Folders of evaluations that were not run."""

from __future__ import annotations

import json
from pathlib import Path

from research.recipe.steps import Task

LENGTHS = [0.5, 1.0]  # 512 and 1,024 tokens
SCORED = (Task(name="hellaswag", shots=10), Task(name="lambada_openai"))


def stored(
    folder: Path,
    chains: dict[int, list[tuple[int, bool]]],
    task: str = "countdown",
    peak: float = 0.0,
    method: str = "DMS",
) -> None:
    """A run; for each document the tokens of its chains, and whether they are right."""
    (folder / "chains").mkdir(parents=True)
    sweep = {"lengths": LENGTHS, "widths": [1]}
    named = {"name": task, "context_length": 4096}
    documents = {"count": 4, "sha256": ""}
    config = {"task": named, "documents": documents, "model": {}, "cr": 1.0, "sweep": sweep}
    header = {
        "config_hash": folder.name, "config": config, "label": "", "method": method,
        "title": "Countdown", "aggregate": "any", "scores_truncated": False, "publishable": True,
        "model_path": "", "versions": {},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(header))
    rows = [
        {
            "document": str(document), "chain": number, "chains": len(found), "seed": 0,
            "prompt_tokens": 7, "tokens": tokens, "finish_reason": "stop", "answers": ["x"],
            "correct": [right], "verdict": "", "prefill_reads": 0.0, "kv_reads": [0.0, 0.0],
            "peak": [peak, peak], "joint_peak": [peak, peak], "joint_peak_shared": [0.0, 0.0],
            "peak_bytes": 0, "seconds": 0.0, "text": "", "session": "a", "clock": 0.0,
            "peak_allocated_bytes": 0,
        }
        for document, found in chains.items()
        for number, (tokens, right) in enumerate(found)
    ]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "chains" / "00000-of-00001.jsonl").write_text(lines)


def write_scores(
    folder: Path, right: int, tasks: tuple[Task, ...] = SCORED, version: str = "1"
) -> None:
    """Write results of the harness: so many of ten documents of HellaSwag are right."""
    values = [float(number < right) for number in range(10)]
    share = right / 10
    scores = {
        "hellaswag@10": {"acc,none": 0.3, "acc_norm,none": share, "acc_norm_stderr,none": 0.01},
        "lambada_openai": {"perplexity,none": 20.0, "acc,none": 0.25, "acc_stderr,none": 0.02},
    }
    types = {"hellaswag@10": "multiple_choice", "lambada_openai": "loglikelihood"}
    keys = [task.key for task in tasks]
    stored = {
        "results": {key: scores[key] for key in keys},
        "configs": {key: {"output_type": types[key]} for key in keys},
        "n-shot": dict.fromkeys(keys, 0),
        "n-samples": {key: {"effective": 10} for key in keys},
        "dms": {
            "kv": {"cr_factor": 1.5, "peak_tokens": 40.0, "cr_factors": [[1.5]]},
            "settings": {"seed": 0},
            "tasks": {key: {"limit": 10} for key in keys},
            "definitions": {},
            "versions": {"lm-eval": version},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(stored))
    lines = (json.dumps({"doc_id": i, "acc_norm": value}) for i, value in enumerate(values))
    (folder / "samples_hellaswag@10.jsonl").write_text("".join(f"{line}\n" for line in lines))
