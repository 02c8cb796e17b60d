"""Distributed checkpoints: megatron's shards plus one JSON that says what they are.

A checkpoint folder is written under a temporary name and renamed when complete, so a folder with
its final name and a `run_state.json` whose file sizes agree is a valid one.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dms_train.mcore import compat, fusions
from dms_train.mcore.errors import CheckpointError

STATE_FILE = "run_state.json"
_METADATA_FILE = ".metadata"
_COMMON_FILE = "common.pt"
_TORCH_CHECKPOINT = "torch.distributed.checkpoint"
# Whole names, not modules: a pickle may ask for `os.system` by way of any module that imports os.
_METADATA_NAMES = frozenset(
    {
        "torch.Size",
        "torch.serialization._get_layout",
        f"{_TORCH_CHECKPOINT}.filesystem._StorageInfo",
        f"{_TORCH_CHECKPOINT}.metadata.BytesStorageMetadata",
        f"{_TORCH_CHECKPOINT}.metadata.ChunkStorageMetadata",
        f"{_TORCH_CHECKPOINT}.metadata.Metadata",
        f"{_TORCH_CHECKPOINT}.metadata.MetadataIndex",
        f"{_TORCH_CHECKPOINT}.metadata.StorageMeta",
        f"{_TORCH_CHECKPOINT}.metadata.TensorProperties",
        f"{_TORCH_CHECKPOINT}.metadata.TensorStorageMetadata",
        f"{_TORCH_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING",
        f"{_TORCH_CHECKPOINT}.planner.SavePlan",
        f"{_TORCH_CHECKPOINT}.planner.TensorWriteData",
        f"{_TORCH_CHECKPOINT}.planner.WriteItem",
        f"{_TORCH_CHECKPOINT}.planner.WriteItemType",
    }
)
# What stands before the reason when a writer of megatron failed.
_WRAPPING = re.compile(r"^Worker failure: (\[Errno \d+\] )?")
# What torch.save says when a file cannot be written; the rest speaks of positions in it.
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")
# What megatron's writers log here they also raise.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)


class _MetadataReader(pickle.Unpickler):
    """Refuses names that torch's checkpoint metadata never contains."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _METADATA_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _sharding() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    sharding = _sharding()
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    models = {
        name: chunk.sharded_state_dict(metadata=sharding)
        for name, chunk in zip(names, chunks, strict=True)
    }
    state: dict[str, Any] = dict(models)
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            models["model"] if len(chunks) == 1 else models, is_loading=loading, metadata=sharding
        )
    return state


def save(
    path: Path, chunks: list[Any], optimizer: Any, state: dict[str, Any], *, leads: bool
) -> None:
    """Write model, optimizer (unless None) and the JSON state; all ranks call it, one leads.

    Raises:
        CheckpointError: The folder cannot be written (for example a full disk); nothing is left
            behind and other checkpoints are untouched.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        _write(partial, _sharded_state(chunks, optimizer, loading=False))
        if leads:
            _seal(partial, state)
    except BaseException as error:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        reason = _why_not_written(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"checkpoint {path}: cannot be written ({reason}); older checkpoints are untouched: "
            "make room and start the same command again"
        ) from error
    if leads:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()


def _write(folder: Path, state: dict[str, Any]) -> None:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, True)
    dist_checkpointing.save(state, str(folder), strategy)


def _why_not_written(error: BaseException) -> str | None:
    """The storage's reason; None when the error is about something else."""
    text = str(error)
    if isinstance(error, CheckpointException):
        # rank 0 alone is told what happened where
        failures = [failure for failure, _ in error.failures.values()]
        text = _WRAPPING.sub("", str(failures[0])) if failures else "see rank 0"
    if any(name in text for name in _TORCH_WRITER):
        return "a file could not be written whole; is the disk full?"
    if isinstance(error, OSError):
        return error.strerror or text
    return text if isinstance(error, CheckpointException | CheckpointingException) else None


def _seal(folder: Path, state: dict[str, Any]) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    _write_state(folder, {**state, "files": files})


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    scratch = folder / f"{STATE_FILE}.partial"
    scratch.write_text(json.dumps(state, indent=1) + "\n")
    scratch.replace(folder / STATE_FILE)


def annotate(path: Path, state: dict[str, Any]) -> None:
    """Replace values of a finished checkpoint's JSON state; one rank calls it."""
    _write_state(path, {**read_state(path), **state})


def check_replaceable(path: Path) -> None:
    """Refuse a folder that was not written here; FileExistsError."""
    if path.exists() and not (path / STATE_FILE).is_file():
        raise FileExistsError(f"{path}: exists and is not a checkpoint; choose another folder")


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint folder after checking that every file is whole.

    Raises:
        CheckpointError: The folder is absent, incomplete or truncated.
    """
    state_file = path / STATE_FILE
    if not state_file.is_file():
        raise CheckpointError(
            f"checkpoint {path}: no {STATE_FILE}; the folder is missing or was not finished"
        )
    try:
        state = json.loads(state_file.read_text())
        files = dict(state["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE_FILE} is damaged ({error}); use an older checkpoint"
        ) from error
    for name, size in files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise CheckpointError(f"checkpoint {path}: {name} {found}; use an older checkpoint")
    return state


def check(path: Path) -> dict[str, Any]:
    """`read_state`, after making sure that loading the folder would run no code of its own.

    Raises:
        CheckpointError: As `read_state`, or a pickle in it is damaged or foreign.
    """
    state = read_state(path)
    try:
        metadata = _MetadataReader(io.BytesIO((path / _METADATA_FILE).read_bytes())).load()
        for name, content in _pickles(path, metadata):
            _require_plain(name, content)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"checkpoint {path}: damaged, or not written by this program ({error}); "
            "do not load files from sources you do not trust"
        ) from error
    return state


def _pickles(path: Path, metadata: Metadata) -> Iterator[tuple[str, bytes]]:
    """File and content of everything that is unpickled besides the metadata."""
    yield _COMMON_FILE, (path / _COMMON_FILE).read_bytes()
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                yield place.relative_path, file.read(place.length)


def _require_plain(name: str, content: bytes) -> None:
    """Torch's own loading of a checkpoint's objects does not restrict what they name."""
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{name} holds more than tensors and plain values") from None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint in a folder of checkpoints, and why newer ones were passed."""
    passed = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        if path.suffix == ".partial":
            continue
        try:
            read_state(path)
        except CheckpointError as error:
            passed.append(str(error))
        else:
            return path, passed
    return None, passed


def load(path: Path, chunks: list[Any], optimizer: Any = None) -> None:
    """Load weights, and optimizer state unless None, into any parallel layout.

    Raises:
        CheckpointError: As `check`, or the folder holds another model.
    """
    check(path)
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
        compat.accept_loaded_state(optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), group)
    try:
        state = dist_checkpointing.load(
            _sharded_state(chunks, optimizer, loading=True), str(path), strategy
        )
    except (CheckpointException, CheckpointingException) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise CheckpointError(
            f"checkpoint {path}: cannot be loaded ({reason}); is it one of this model?"
        ) from error
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{index}"], strict=True)
    if optimizer is not None:
        compat.load_optimizer_state(optimizer, state["optimizer"])
        fusions.fuse_adam(optimizer)
