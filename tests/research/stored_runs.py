"""Folders of evaluations that were not run."""

from __future__ import annotations

import json
from pathlib import Path

LENGTHS = [0.5, 1.0]  # 512 and 1,024 tokens


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
