"""Tiles and launch settings of the training kernels, by head size, precision and GPU.

The tables hold defaults. `tuning` measures other tiles and stores the fastest in a file, which is
read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from dms_train.kernels.errors import KernelError
from dms_train.kernels.options import ROW_TILE, TUNED_FILE


class TrainTiles(NamedTuple):
    """Sizes and launch settings of one kernel.

    Attributes:
        block_m: Queries of a tile.
        block_n: Keys of a tile.
        warps: Warps of a program.
        stages: Tiles in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


class TilePlan(NamedTuple):
    """Launch plan of one problem.

    Attributes:
        forward: Tiles of the forward pass; the lists of live tiles have its block_n.
        backward: Tiles of the backward pass. Their block_m divides the forward pass's, because the
            forward pass fills lse in whole tiles.
        hopper: Whether the kernels scheduled by hand for Hopper run.
        bulk_sums: Whether sums of dq are added by bulk copies (Hopper and later).
        precision: Precision of float32 matrix products.
        processors: Multiprocessors of the GPU.
        cache_bytes: Bytes of its L2 cache.
    """

    forward: TrainTiles
    backward: TrainTiles
    hopper: bool
    bulk_sums: bool
    precision: str
    processors: int
    cache_bytes: int


# Measured on an H200 (`benchmarks/attention`); forward tiles of 64 keys on an H100.
_HOPPER = {
    64: (TrainTiles(128, 64, 4, 2), TrainTiles(64, 128, 8, 3)),
    128: (TrainTiles(128, 128, 4, 2), TrainTiles(64, 128, 8, 3)),
}
# Head size up to: tiles that fit the 99 KiB of shared memory of the smallest GPUs since Ampere.
_PORTABLE = {
    64: (TrainTiles(128, 64, 4, 3), TrainTiles(64, 64, 4, 2)),
    128: (TrainTiles(128, 64, 8, 2), TrainTiles(32, 64, 8, 1)),
    256: (TrainTiles(64, 32, 8, 1), TrainTiles(16, 32, 8, 1)),
}
_FLOAT32 = {
    64: (TrainTiles(64, 32, 4, 1), TrainTiles(32, 32, 4, 1)),
    128: (TrainTiles(32, 32, 4, 1), TrainTiles(16, 32, 4, 1)),
    256: (TrainTiles(16, 16, 4, 1), TrainTiles(16, 16, 4, 1)),
}


_forced: list[TilePlan] = []


def plan_tiles(dtype: torch.dtype, head_size: int, device: torch.device) -> TilePlan:
    """Return the plan for a problem on a device: the tuned one, or the default.

    Raises:
        KernelError: For head sizes above 256.
    """
    return _forced[-1] if _forced else _stored_or_default(dtype, head_size, device)


@contextmanager
def forced(plan: TilePlan) -> Iterator[None]:
    """Run every problem inside the block with this plan."""
    _forced.append(plan)
    try:
        yield
    finally:
        _forced.pop()


def clear_cache() -> None:
    """Read the file of tuned tiles again at the next call."""
    _stored_or_default.cache_clear()


@cache
def _stored_or_default(dtype: torch.dtype, head_size: int, device: torch.device) -> TilePlan:
    plan = default_plan(dtype, head_size, device)
    tuned = read_tuned(TUNED_FILE).get(family(dtype, head_size, device))
    if tuned is None or not _fit(plan, *tuned):
        return plan
    return plan._replace(forward=tuned[0], backward=tuned[1])


def _fit(plan: TilePlan, forward: TrainTiles, backward: TrainTiles) -> bool:
    """Return whether the kernels support stored tiles; an older version may have written them."""
    if forward.block_m % backward.block_m or ROW_TILE % forward.block_m:
        return False
    shapes = (forward.block_m, *backward[:3])
    return not plan.hopper or (
        shapes == (plan.forward.block_m, *plan.backward[:3]) and backward.stages > 1
    )


def family(dtype: torch.dtype, head_size: int, device: torch.device) -> str:
    """Return the name of problems with the same tiles: GPU model, precision, head size."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    width = max(16, 1 << (head_size - 1).bit_length())
    return f"{name}, {str(dtype).removeprefix('torch.')}, {width}"


def read_tuned(path: Path) -> dict[str, tuple[TrainTiles, TrainTiles]]:
    """Return forward and backward tiles by family; empty if the file is absent or unreadable."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: (TrainTiles(*tiles[0]), TrainTiles(*tiles[1])) for name, tiles in stored.items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def default_plan(dtype: torch.dtype, head_size: int, device: torch.device) -> TilePlan:
    """Return the plan of the tables; without a GPU the plan of the interpreter.

    Raises:
        KernelError: For head sizes above 256.
    """
    if head_size > 256:
        raise KernelError(
            f"head size {head_size}: the fused kernels take up to 256; use kernels=blockwise"
        )
    major, processors, cache_bytes = 0, 1, 1 << 20
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        properties = torch.cuda.get_device_properties(device)
        processors = properties.multi_processor_count
        cache_bytes = properties.L2_cache_size
    half = dtype in (torch.float16, torch.bfloat16)
    if half and major == 9 and 32 < head_size <= 128:
        forward, backward = _HOPPER[64 if head_size <= 64 else 128]
        return TilePlan(forward, backward, True, True, "ieee", processors, cache_bytes)
    table = _PORTABLE if half else _FLOAT32
    forward, backward = next(tiles for size, tiles in table.items() if head_size <= size)
    return TilePlan(forward, backward, False, major >= 9, "ieee", processors, cache_bytes)
