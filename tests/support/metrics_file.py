"""The metrics of a run that may still be writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl that are complete."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(run: Path) -> dict[int, float]:
    """The training loss of each step that was not skipped."""
    return {row["step"]: row["train/loss"] for row in rows(run) if "train/loss" in row}
