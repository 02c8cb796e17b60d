"""Tiles and launch settings of the training kernels, by head size, precision and GPU."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dms_train.kernels.errors import KernelError


class Tiles(NamedTuple):
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
    """How one problem is run.

    Attributes:
        forward: Tiles of the forward pass; the lists of live tiles have its block_n.
        backward: Tiles of the backward pass; its block_m divides that of the forward pass, which
            fills lse in whole tiles.
        hopper: Whether the kernels scheduled by hand for Hopper run.
        bulk_sums: Whether sums of dq are added by bulk copies (Hopper and later).
        precision: Of matrix products of float32.
        processors: Multiprocessors of the GPU.
        cache_bytes: Its second-level cache.
    """

    forward: Tiles
    backward: Tiles
    hopper: bool
    bulk_sums: bool
    precision: str
    processors: int
    cache_bytes: int


# Measured on an H200; `benchmarks/attention.py` prints what they reach.
_HOPPER = {
    64: (Tiles(128, 128, 4, 2), Tiles(64, 128, 8, 3)),
    128: (Tiles(128, 128, 4, 2), Tiles(64, 128, 8, 3)),
}
# Head size up to: tiles that fit the 99 KiB of shared memory of the smallest GPUs since Ampere.
_PORTABLE = {
    64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 64, 8, 2), Tiles(32, 64, 8, 1)),
    256: (Tiles(64, 32, 8, 1), Tiles(16, 32, 8, 1)),
}
_FLOAT32 = {
    64: (Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
    128: (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1)),
    256: (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}


@cache
def plan_tiles(dtype: torch.dtype, head_size: int, device: torch.device) -> TilePlan:
    """The plan for a problem on a device; without a GPU that of the interpreter.

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
