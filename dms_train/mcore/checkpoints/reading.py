"""Reader of distributed checkpoints: finds a valid one, loads it into any layout.

A checkpoint folder holds megatron's shards and one JSON file that describes them
(`checkpoints.state`). It was written under another name and renamed when complete
(`checkpoints.saving`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dms_train.mcore import compat, groups
from dms_train.mcore.checkpoints import checksums, optimizer_shards
from dms_train.mcore.checkpoints.optimizer_shards import Masters
from dms_train.mcore.checkpoints.state import (
    damaged_files,
    read_state,
    recorded_files,
    unreadable,
    wrong_content,
)
from dms_train.mcore.errors import CheckpointError, DamagedError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import fusions

_METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
_TORCH_CHECKPOINT = "torch.distributed.checkpoint"
# Whole names, not modules: a pickle may name `os.system` through any module that imports os.
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


class _MetadataReader(pickle.Unpickler):
    """Unpickler for torch's checkpoint metadata; refuses names that metadata never contains."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _METADATA_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return an enumeration member; Python 3.11.0 to 3.11.3 pickle it as a `getattr` call."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it takes {name} of {kind}")
    return kind[name]


def _sharding() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_models(chunks: list[Any]) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {
        name: chunk.sharded_state_dict(metadata=_sharding())
        for name, chunk in zip(names, chunks, strict=True)
    }


def sharded_state(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state dict of the model, and of the optimizer unless it is None."""
    sharding, models = _sharding(), _sharded_models(chunks)
    state: dict[str, Any] = dict(models)
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
        optimizer_shards.keep_shards(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            models["model"] if len(chunks) == 1 else models, is_loading=loading, metadata=sharding
        )
    return state


def check(path: Path) -> dict[str, Any]:
    """Check that loading the folder runs no code of its own, then `read_state`.

    Raises:
        DamagedError: See `read_state`; also, a pickle cannot be read or has changed since it was
            written.
        CheckpointError: A pickle holds names that this program never writes.
    """
    state = read_state(path)
    name = _METADATA_FILE
    try:
        metadata = _metadata(path)
        for name, content in _pickles(path, metadata):
            _require_plain(name, content)
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle raises anything
        for damaged, reason in damaged_files(path, [_METADATA_FILE, name]).items():
            raise wrong_content(path, damaged, reason) from error
        raise CheckpointError(
            f"checkpoint {path}: damaged, or not written by this program ({error}); "
            "do not load files from sources you do not trust"
        ) from error
    return state


def _metadata(path: Path) -> Metadata:
    metadata = _MetadataReader(io.BytesIO((path / _METADATA_FILE).read_bytes())).load()
    return cast(Metadata, metadata)


def _pickles(path: Path, metadata: Metadata) -> Iterator[tuple[str, bytes]]:
    """Yield file and content of every pickle except the metadata."""
    yield COMMON_FILE, (path / COMMON_FILE).read_bytes()
    for index, storage in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with (path / storage.relative_path).open("rb") as file:
                file.seek(storage.offset)
                yield storage.relative_path, file.read(storage.length)


def _require_plain(name: str, content: bytes) -> None:
    """Refuse foreign names in a pickle, because torch's own loading does not."""
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{name} holds more than tensors and plain values") from None


def newest(folder: Path, before: str | None = None) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint in a folder, and why newer ones were skipped.

    Args:
        folder: Folder of checkpoints, each named `step_` and eight digits.
        before: Look only at checkpoints older than the one of this name.

    Raises:
        CheckpointError: The newest whole checkpoint was not written by this program.
    """
    passed = []
    for path in sorted(folder.glob("step_????????"), reverse=True):
        if before is not None and path.name >= before:
            continue
        try:
            check(path)
        except DamagedError as error:
            passed.append(str(error))
        else:
            return path, passed
    return None, passed


def verify(path: Path, view: ParallelView) -> None:
    """Compare every file of a checkpoint with its checksum; all ranks call it and share the files.

    Raises:
        DamagedError: On every rank, with the problem of the first rank that has one.
    """
    problem = None
    try:
        recorded = recorded_files(path)
        mine = checksums.share(recorded, view.rank, view.world_size)
        for name, reason in checksums.damaged(path, mine).items():
            raise wrong_content(path, name, reason)
    except DamagedError as error:  # the other ranks wait for this outcome
        problem = str(error)
    for reported_problem in groups.values(problem):
        if reported_problem is not None:
            raise DamagedError(reported_problem)


def load(path: Path, chunks: list[Any], optimizer: Any = None) -> None:
    """Load weights, and optimizer state unless None, into any parallel layout.

    Raises:
        CheckpointError: See `check`; also, the folder holds another model.
    """
    check(path)
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
        compat.accept_loaded_state(optimizer)
    state = _load(path, sharded_state(chunks, optimizer, loading=True))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{index}"], strict=True)
    if optimizer is not None:
        compat.load_optimizer_state(optimizer, state["optimizer"])
        fusions.fuse_adam(optimizer)


def load_masters(path: Path, chunks: list[Any], optimizer: Any) -> None:
    """Load the optimizer's fp32 weights that the checkpoint has, in any layout.

    A checkpoint has those that its run trained, or none. The moments of Adam and all other fp32
    weights stay as they are. `load` has checked the folder.
    """
    stored = {key for key in _metadata(path).state_dict_metadata if key.startswith(Masters.KEY)}
    if not stored:
        return
    compat.create_optimizer_state(optimizer)
    masters = Masters(optimizer, _sharded_models(chunks), stored)
    masters.set(_load(path, masters.sharded))


def _load(path: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    """Load the sharded entries; all ranks call it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    try:
        return cast(dict[str, Any], dist_checkpointing.load(sharded, str(path), strategy))
    except (CheckpointException, CheckpointingException) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise CheckpointError(
            f"checkpoint {path}: cannot be loaded ({reason}); is it one of this model?"
        ) from error
