"""Inputs of a run: a resumed run must find the same data and base model.

Every checkpoint records them. Data is known by the hashes in its manifests, the base model by its
architecture and the hashes of its weight files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dms_train.app.start_point import StartPoint, described_model
from dms_train.config.build import ConfigError
from dms_train.data.errors import DataError
from dms_train.data.manifest import bin_hashes, check_hash, file_sha256, idx_hashes, read_manifest
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import groups
from dms_train.mcore.checkpoints.state import read_state
from dms_train.mcore.errors import CheckpointError
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log

DATA, MODEL = "data_sha256", "model_sha256"
_SHOWN = 12  # digits of a hash
_LARGE_BYTES = 10**9  # reading them takes a second or more
_FIX = "restore it, or choose another run.dir to start again"


def record(prefixes: Sequence[str], model_dir: Path | None, view: ParallelView) -> dict[str, Any]:
    """Describe the inputs of a run for its checkpoints.

    All ranks call it and share the weight files; each is read once.

    Args:
        prefixes: Prefixes of the token files, in order.
        model_dir: The base model; None when training from scratch.
        view: Position of this rank in the parallel groups.

    Raises:
        ConfigError: On every rank alike, when a weight file cannot be read.
    """
    return {DATA: data_hashes(prefixes), MODEL: _weight_hashes(model_dir, view)}


def require_same_data(prefixes: Sequence[str], start: StartPoint) -> None:
    """Refuse to resume with data or an architecture other than those the run was started with.

    Only manifests are read. `require_same_weights` compares weight files, which takes longer.

    Args:
        prefixes: Prefixes of the token files, in order.
        start: Start of the run, with the architecture of the base model.

    Raises:
        ConfigError: The first input that differs.
        CheckpointError: The checkpoint does not record its inputs.
    """
    if not start.resumes:
        return
    recorded = _recorded(start, DATA)
    for prefix, now, hashed in zip(prefixes, data_hashes(prefixes), recorded, strict=True):
        if now != hashed:
            raise _refusal(f"data.paths={prefix}: this is not the data", now, hashed, start)
    assert start.student is not None
    trained, _ = described_model(start.student, read_state(start.student))
    before = asdict(trained)
    for key, value in asdict(start.architecture).items():
        if before[key] != value:
            raise ConfigError(
                f"model.path={start.model_dir}: its config.json says {key}={value}, "
                f"{start.student} was trained with {before[key]}; {_FIX}"
            )


def require_same_weights(current: Mapping[str, Any], start: StartPoint) -> None:
    """Refuse to resume with another base model than the one the run was started with.

    Args:
        current: Result of `record`.
        start: Start of the run.

    Raises:
        ConfigError: The first weight file that differs.
        CheckpointError: The checkpoint does not record its base model.
    """
    if not start.resumes:
        return
    recorded = _recorded(start, MODEL)
    for name in sorted({*current[MODEL], *recorded}):
        now, before = current[MODEL].get(name), recorded.get(name)
        if now != before:
            what = f"model.path={start.model_dir}: {name} is not the file"
            raise _refusal(what, now, before, start)


def verify_data(prefixes: Sequence[str], view: ParallelView) -> None:
    """Compare every byte of the token files and their indices with the manifests.

    All ranks call it and share the files; each file is read once.

    Args:
        prefixes: Prefixes of the token files.
        view: Position of this rank in the parallel groups.

    Raises:
        ConfigError: On every rank alike, one line for each file that is damaged or unreadable.
    """
    hashes: dict[Path, str] = {}
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        hashes |= bin_hashes(prefix, manifest) | idx_hashes(prefix, manifest)
    by_size = sorted(hashes, key=lambda file: (-file.stat().st_size, str(file)))
    total = sum(file.stat().st_size for file in by_size)
    if view.rank == 0 and total >= _LARGE_BYTES:
        log.logger().info("verifying %d token file(s), %.1f GB", len(by_size), total / 1e9)
    mine = by_size[view.rank :: view.world_size]
    problems = groups.of_ranks(lambda: [_damage(file, hashes[file]) for file in mine])
    damaged = [problem for own in problems for problem in own if problem is not None]
    if damaged:
        raise ConfigError(*damaged)


def _damage(file: Path, sha256: str) -> str | None:
    """Return the problem of a file, or None; an exception would leave other ranks waiting."""
    try:
        check_hash(file, sha256)
    except DataError as error:
        return f"data.paths: {error}"
    except OSError as error:
        return f"data.paths: {file}: {error.strerror}; copy it again"
    return None


def _refusal(what: str, now: str | None, before: str | None, start: StartPoint) -> ConfigError:
    shown = f"SHA-256 {(now or 'absent')[:_SHOWN]}, recorded {(before or 'absent')[:_SHOWN]}"
    return ConfigError(f"{what} that {start.student} was trained with ({shown}); {_FIX}")


def _recorded(start: StartPoint, key: str) -> Any:
    assert start.student is not None
    stored = read_state(start.student)
    if key not in stored:
        raise CheckpointError(
            f"checkpoint {start.student}: does not record {key} of its run; choose another "
            "run.dir to start again"
        )
    return stored[key]


def data_hashes(prefixes: Sequence[str]) -> list[str]:
    """Hash each shard's files: tokens, document bounds and the loss mask if there is one."""
    manifests = [read_manifest(prefix) for prefix in prefixes]
    masks = ["" if m.loss_mask is None else m.loss_mask.bin_sha256 for m in manifests]
    contents = [f"{m.bin_sha256}{m.idx_sha256}{x}" for m, x in zip(manifests, masks, strict=True)]
    return [hashlib.sha256(content.encode()).hexdigest() for content in contents]


def _weight_hashes(model_dir: Path | None, view: ParallelView) -> dict[str, str]:
    if model_dir is None:
        return {}
    mine: dict[str, str] = {}
    problem = None
    try:
        by_size = sorted(WeightReader(model_dir).files, key=lambda f: (-f.stat().st_size, f.name))
        mine = {file.name: file_sha256(file) for file in by_size[view.rank :: view.world_size]}
    except OSError as error:  # the others wait for the result
        problem = f"model.path={model_dir}: {error.filename}: {error.strerror}; copy it again"
    hashes: dict[str, str] = {}
    for of_rank, refusal in groups.values((mine, problem)):
        if refusal is not None:
            raise ConfigError(refusal)
        hashes |= of_rank
    return hashes
