"""Measurement of tiles of the training attention on this GPU; the fastest are stored in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from dms_train.kernels.train_attention import launch_plan
from dms_train.kernels.train_attention import triton_attention as triton_train
from dms_train.kernels.train_attention.launch_plan import TilePlan, TrainTiles

_REPEATS = 5


class Trial(NamedTuple):
    """One measurement; `seconds` is infinite if the tiles do not fit the GPU."""

    plan: TilePlan
    seconds: float


class Load(NamedTuple):
    """Create the timed problem: causal, with random decisions."""

    length: int = 8192
    heads: int = 16
    group: int = 4
    window: int = 256


def candidates(plan: TilePlan) -> Iterator[TilePlan]:
    """Yield the plan, then its neighbours: one pass changed at a time."""
    yield plan
    for forward in _neighbours(plan.forward, smallest=16):
        # the kernels for Hopper are written for tiles of 128 queries, backward of 64 by 128 keys
        fits = forward.block_m == plan.forward.block_m or not plan.hopper
        if forward.block_m % plan.backward.block_m == 0 and fits:
            yield plan._replace(forward=forward)
    for backward in _neighbours(plan.backward, smallest=16):
        same = backward[:2] == plan.backward[:2] and backward.stages > 1
        if plan.forward.block_m % backward.block_m == 0 and (same or not plan.hopper):
            yield plan._replace(backward=backward)


def _neighbours(tiles: TrainTiles, smallest: int) -> Iterator[TrainTiles]:
    for stages in {tiles.stages - 1, tiles.stages + 1} - {0}:
        yield tiles._replace(stages=stages)
    if tiles.block_n // 2 >= smallest:
        yield tiles._replace(block_n=tiles.block_n // 2)
    if tiles.block_m // 2 >= smallest:
        yield tiles._replace(block_m=tiles.block_m // 2)


def tune(
    dtype: torch.dtype,
    head_size: int,
    device: torch.device,
    load: Load = Load(),  # noqa: B008
    seconds: float = 60.0,
    note: Callable[[Trial], None] = lambda _: None,
) -> Trial:
    """Find the fastest candidate within a time budget, and store it for later runs.

    Args:
        dtype: Dtype of queries, keys and values.
        head_size: Up to 256.
        device: GPU to measure on.
        load: Problem to measure.
        seconds: Time after which no further candidate is started. The default is always measured.
        note: Called with every measurement.
    """
    deadline = time.monotonic() + seconds
    family = launch_plan.family(dtype, head_size, device)
    best: Trial | None = None
    for plan in candidates(launch_plan.default_plan(dtype, head_size, device)):
        if best is not None and time.monotonic() > deadline:
            break
        trial = Trial(plan, _measure(plan, dtype, head_size, device, load))
        note(trial)
        if best is None or trial.seconds < best.seconds:
            best = trial
    assert best is not None
    store(launch_plan.TUNED_FILE, family, best.plan)
    launch_plan.clear_cache()
    return best


def store(path: Path, family: str, plan: TilePlan) -> None:
    """Add a family to the file; replace the file atomically."""
    known = {name: list(tiles) for name, tiles in launch_plan.read_tuned(path).items()}
    known[family] = [plan.forward, plan.backward]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    written.replace(path)


def _measure(
    plan: TilePlan, dtype: torch.dtype, head_size: int, device: torch.device, load: Load
) -> float:
    """Return the seconds of a forward and a backward pass, the minimum of a few runs."""
    hk = load.heads // load.group

    def normal(heads: int) -> torch.Tensor:
        x = torch.randn(1, load.length, heads, head_size, device=device, dtype=dtype)
        return x.requires_grad_()

    leaves = [normal(load.heads), normal(hk), normal(hk)]
    log_keep = F.logsigmoid(torch.randn(1, hk, load.length, device=device))
    leaves.append(log_keep.requires_grad_())
    try:
        with launch_plan.forced(plan):
            return min(_once(leaves, load) for _ in range(_REPEATS + 1))
    except (triton.OutOfResources, triton.CompilationError):
        return float("inf")


def _once(leaves: list[torch.Tensor], load: Load) -> float:
    start = time.perf_counter()
    query, key, value, log_keep = leaves
    out = triton_train.dms_attention(query, key, value, log_keep, load.window, 0.1)
    torch.autograd.grad(out, leaves, out.detach())
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
