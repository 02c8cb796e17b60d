"""Weight files of an export, which all ranks of a run write at the same time."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist

from dms_train.export.writer import check_weight, require_all
from dms_train.hf.adapter import (
    ADAPTER_WEIGHTS,
    adapter_config,
    adapter_metadata,
)
from dms_train.hf.errors import HFError
from dms_train.hf.formats import AdapterBase
from dms_train.hf.json_files import write_json
from dms_train.hf.safetensors_files import save_tensors
from dms_train.hf.side_files import ADAPTER_CONFIG
from dms_train.hf.stored import stored_shapes
from dms_train.hf.stored_tensors import to_stored
from dms_train.hf.tensor_values import dtype_name
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_writer import SHARD_BYTES, name_shards, write_shard
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.model.low_rank import AdapterTensors

_Names = dict[int, list[str]]  # tensors of each shard


def write_weights(
    engine: McoreEngine, directory: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of a model to a directory that all ranks share; every rank calls it.

    A rank holds one shard at a time in host memory. Rank 0 gives the files their names at the end,
    so that an interrupted call leaves nothing that can be read.

    Args:
        engine: Engine of the model.
        directory: Directory that rank 0 has made.
        dtype: Dtype of the files.
        shard_bytes: Maximum size of a file, unless a single parameter is larger.

    Raises:
        HFError: On every rank, when a tensor is missing, of another shape or not finite, or a file
            cannot be written.
        OSError: On every rank, when a file cannot be written.
    """
    dist.barrier()  # the directory exists
    shards: _Names = {}
    for names, error in groups.of_ranks(lambda: _write_own(engine, directory, dtype, shard_bytes)):
        if error is not None:
            raise error
        shards |= names
    shapes = stored_shapes(engine.architecture)
    require_all(shapes.keys() - {name for names in shards.values() for name in names})
    if engine.view.rank == 0:
        total = dtype.itemsize * sum(math.prod(shape) for shape in shapes.values())
        name_shards(directory, [shards[number] for number in sorted(shards)], total)


def write_adapter(engine: McoreEngine, directory: Path, base: AdapterBase) -> None:
    """Write the adapters of a model in PEFT's format; every rank calls it.

    Args:
        engine: Engine of the model.
        directory: Directory that rank 0 has made.
        base: The base model.

    Raises:
        HFError: On every rank, when a tensor is not finite or the file cannot be written.
        OSError: On every rank, when a file cannot be written.
    """
    collected = engine.adapter_tensors()
    problem = groups.of_rank_0(lambda: _write_collected(collected, directory, base))
    if problem is not None:
        raise problem


def _write_collected(
    collected: AdapterTensors | None, directory: Path, base: AdapterBase
) -> Exception | None:
    """Write the adapters; return why they could not be written."""
    assert collected is not None  # rank 0
    tensors, scale, base_rows = collected
    dtype = base_rows[0].dtype
    # float32 may hold weights that an earlier run or the checkpoint's own run rounded
    trained = base.dtype if dtype == torch.float32 else dtype_name(dtype)
    metadata = adapter_metadata(base_rows, trained)
    try:
        for name, tensor in tensors.items():
            check_weight(name, tensor, tuple(tensor.shape))
        (directory / ADAPTER_WEIGHTS).parent.mkdir()
        save_tensors(directory / ADAPTER_WEIGHTS, tensors, metadata)
        write_json(directory / ADAPTER_CONFIG, adapter_config(base, tensors, scale))
    except (HFError, OSError) as error:
        return error
    return None


def _write_own(
    engine: McoreEngine, directory: Path, dtype: torch.dtype, shard_bytes: int
) -> tuple[_Names, Exception | None]:
    """Write the shards of this rank; return their tensors, and why one could not be written."""
    shapes, written = expected_shapes(engine.architecture), _Names()
    problem: Exception | None = None
    for number, tensors in engine.hf_shards(dtype, shard_bytes):
        if problem is not None:
            continue  # other ranks still gather with this one
        try:
            for name, tensor in tensors.items():
                check_weight(name, tensor, shapes.get(name))
            tensors = dict(to_stored(engine.architecture, tensors.items()))
            write_shard(directory, number, tensors)
        except (HFError, OSError) as error:
            problem = error
        written[number] = list(tensors)
    return written, problem
