"""Distributed checkpoints: megatron's shards plus one JSON that says what they are.

A checkpoint folder is written under a temporary name and renamed when complete, so a folder with
its final name and a `run_state.json` whose file sizes agree is a valid one.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dms_train.mcore import compat
from dms_train.mcore.errors import CheckpointError

STATE_FILE = "run_state.json"
_METADATA_FILE = ".metadata"
_SAFE_MODULES = ("torch", "megatron.core.dist_checkpointing", "collections", "pathlib", "builtins")
_UNSAFE_BUILTINS = frozenset({"eval", "exec", "compile", "open", "__import__", "getattr"})


class _MetadataCheck(pickle.Unpickler):
    """Refuses names that torch's checkpoint metadata never contains."""

    def find_class(self, module: str, name: str) -> Any:
        known = any(module == safe or module.startswith(safe + ".") for safe in _SAFE_MODULES)
        if not known or (module == "builtins" and name in _UNSAFE_BUILTINS):
            raise CheckpointError(
                f"checkpoint metadata names {module}.{name}, which no checkpoint of this program "
                "contains; do not load files from sources you do not trust"
            )
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
        OSError: The folder cannot be written (for example a full disk); nothing is left behind.
    """
    partial = path.with_name(path.name + ".partial")
    if leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, True)
    try:
        dist_checkpointing.save(
            _sharded_state(chunks, optimizer, loading=False), str(partial), strategy
        )
        if leads:
            _seal(partial, state)
    except BaseException:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if leads:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()


def _seal(folder: Path, state: dict[str, Any]) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    text = json.dumps({**state, "files": files}, indent=1)
    (folder / STATE_FILE).write_text(text + "\n")


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
        files = state["files"]
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
        CheckpointError: The folder is incomplete or its metadata is not a checkpoint's.
    """
    read_state(path)
    _MetadataCheck(io.BytesIO((path / _METADATA_FILE).read_bytes())).load()
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
        compat.accept_loaded_state(optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), group)
    state = dist_checkpointing.load(
        _sharded_state(chunks, optimizer, loading=True), str(path), strategy
    )
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{index}"], strict=True)
    if optimizer is not None:
        compat.load_optimizer_state(optimizer, state["optimizer"])
