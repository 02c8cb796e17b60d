"""Sources, licences and shares of the text of a run, for its checkpoints and model cards."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dms_train.app.start_point import StartPoint
from dms_train.data.manifest import origins_of, read_manifest
from dms_train.data.options import DataOptions
from dms_train.export.card import TRAINING_DATA
from dms_train.hf.formats import read_provenance
from dms_train.mcore.checkpoints.state import STATE_FILE, read_state


def describe(options: DataOptions, start: StartPoint) -> list[list[dict[str, Any]]]:
    """Return the origins of the text of each run that trained the student, the last one last.

    Args:
        options: Data of this run.
        start: Start of the run. A resumed run keeps what its checkpoint records; a run with
            `run.load` appends its own origins to those of the student.

    Returns:
        For each run, `source`, `license`, `model`, `sha256` and `share` of each origin. The shares
        of a run add up to 1.
    """
    before = [] if start.student is None else _recorded(start.student)
    if start.resumes and before:
        return before
    return [*before, origins(options)]


def origins(options: DataOptions) -> list[dict[str, Any]]:
    """Return the origins of the data of a run; without `data.weights` shards count by tokens."""
    manifests = [read_manifest(path) for path in options.paths]
    weights = options.weights or [manifest.tokens for manifest in manifests]
    records = []
    for manifest, weight in zip(manifests, weights, strict=True):
        parts = origins_of(manifest)
        for part in parts:
            record = asdict(part)
            inner = record.pop("tokens") / sum(one.tokens for one in parts)
            records.append({**record, "share": weight / sum(weights) * inner})
    return records


def _recorded(student: Path) -> list[list[dict[str, Any]]]:
    """Return the record of a checkpoint or an export; empty if it has none."""
    read = read_state if (student / STATE_FILE).is_file() else read_provenance
    stored = read(student)
    recorded: list[list[dict[str, Any]]] = stored.get(TRAINING_DATA, [])
    return recorded
