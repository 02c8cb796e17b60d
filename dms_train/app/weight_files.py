"""Weight files of an export, which all ranks of a run write at the same time."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist

from dms_train.export.writer import check_weight, require_all
from dms_train.hf.directory import SHARD_BYTES, name_shards, write_shard
from dms_train.hf.errors import HFError
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine

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
    shapes = expected_shapes(engine.architecture)
    require_all(shapes.keys() - {name for names in shards.values() for name in names})
    if engine.view.rank == 0:
        total = dtype.itemsize * sum(math.prod(shape) for shape in shapes.values())
        name_shards(directory, [shards[number] for number in sorted(shards)], total)


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
            write_shard(directory, number, tensors)
        except (HFError, OSError) as error:
            problem = error
        written[number] = list(tensors)
    return written, problem
