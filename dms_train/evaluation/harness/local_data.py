"""Definitions of lm-evaluation-harness whose data sets are files below a folder.

Prompts, answers and metrics stay those of the harness. A definition that includes the harness' own
YAML file replaces the location of the data set, and splits that are absent.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.benchmark_files import MANIFEST
from dms_train.evaluation.tasks.data_files import file_sha256

_SPLITS = ("training_split", "validation_split", "test_split")
Definition = dict[str, Any]


@contextlib.contextmanager
def local_definitions(index: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Definition]]:
    """Let tasks read the files below a folder, for tasks that are loaded inside the block.

    A data set is `folder/DATASET[/CONFIGURATION]/SPLIT.jsonl`. Tasks without files are unchanged.

    Args:
        index: Tasks of the harness by name, `TaskManager.task_index`; `yaml_path` of their entries
            is replaced.
        folder: Written by `benchmark_files.convert`, or laid out like its output.

    Yields:
        What was changed, by task: `file` of the definition, `data_files` and `changes`.

    Raises:
        EvaluationError: There is no such folder, or a file differs from its manifest.
    """
    folder = folder.resolve()
    hashes = _checked(folder)
    used: dict[str, Definition] = {}
    with tempfile.TemporaryDirectory(prefix="dms-tasks-") as temporary:
        for name, entry in index.items():
            config = entry.cfg or {}
            files = _files(folder, config)
            changes = _split_changes(config, set(files))
            if not files or changes is None or entry.yaml_path is None:
                continue
            override = Path(temporary) / f"{len(used)}.yaml"
            content = {
                "include": str(entry.yaml_path),
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {k: str(v) for k, v in files.items()}},
                **changes,
            }
            override.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
            used[name] = {
                "file": "/".join(entry.yaml_path.parts[-2:]),
                "data_files": {
                    split: {"path": str(path.relative_to(folder)), "sha256": hashes[path]}
                    for split, path in files.items()
                },
                "changes": changes,
            }
            entry.yaml_path = override
        yield used


def _checked(folder: Path) -> dict[Path, str]:
    """Return the hash of each JSON lines file, after a comparison with the manifest."""
    if not folder.is_dir():
        raise EvaluationError(
            f"--data {folder}: no such folder; dms-eval data --out {folder} writes one"
        )
    hashes = {path: file_sha256(path) for path in sorted(folder.rglob("*.jsonl"))}
    manifest = folder / MANIFEST
    stated = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.exists() else {}
    for name, facts in stated.items():
        found = hashes.get(folder / name, "absent")
        if found != facts["sha256"]:
            raise EvaluationError(
                f"{folder / name}: its SHA-256 is {found}, {MANIFEST} has {facts['sha256']}; run "
                "dms-eval data again"
            )
    return hashes


def _files(folder: Path, config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of a task's data set by split."""
    data_set, name = config.get("dataset_path"), config.get("dataset_name")
    if not isinstance(data_set, str):
        return {}
    place = folder / data_set / name if isinstance(name, str) else folder / data_set
    return {path.stem: path for path in sorted(place.glob("*.jsonl"))}


def _split_changes(config: Mapping[str, Any], present: set[str]) -> dict[str, Any] | None:
    """Return changes for splits without a file; None if the evaluated split has none.

    Examples come from the split that the harness falls back to: validation before test. Where only
    the evaluated split exists, they come from it, and the harness leaves out the question itself.
    """
    evaluated = config.get("test_split") or config.get("validation_split")
    if evaluated not in present:
        return None
    changes: dict[str, Any] = {
        key: None for key in _SPLITS if config.get(key) and config[key] not in present
    }
    stated = config.get("fewshot_split")
    written = stated is None and "samples" in (config.get("fewshot_config") or {})
    if stated in present or written:
        return changes
    sources = (config.get("training_split"), config.get("validation_split"))
    other = next((split for split in sources if split in present - {evaluated}), None)
    if other is None:
        return changes | {"test_split": evaluated, "fewshot_split": evaluated}
    return changes if stated is None else changes | {"fewshot_split": other}
