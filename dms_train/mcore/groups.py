"""Process groups: started here, visible elsewhere as one frozen view."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from dms_train.mcore import compat, runtime
from dms_train.mcore.options import ParallelOptions

T = TypeVar("T")
_PATIENCE_DAYS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelView:
    """Sizes, ranks and groups as this process sees them.

    Data-parallel ranks read different samples. The ranks of `dp_cp_group` hold the same weights,
    except experts.
    """

    device: torch.device
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vp_size: int | None
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        """True if this process holds the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """True if this process contributes loss statistics: one of each tensor-parallel group."""
        return self.is_last_stage and self.tp_rank == 0

    def own_positions(self, x: Tensor) -> Tensor:
        """Return this rank's positions of x [b, s], whose length `cp_size` divides."""
        return x.chunk(self.cp_size, 1)[self.cp_rank]


def _local_device() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return runtime.start()


def own_processors() -> int:
    """Return this process's share of the processors of its host, at least one."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _init_process_group(device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def start(options: ParallelOptions, seed: int) -> ParallelView:
    """Join the process group (once per process) and lay out the parallel groups."""
    device = _local_device()
    timeout = timedelta(minutes=options.distributed_timeout_minutes)
    if not dist.is_initialized():
        _init_process_group(device, timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        distributed_timeout_minutes=max(1, round(options.distributed_timeout_minutes)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelView(
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        vp_size=options.virtual_pipeline_model_parallel_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_dp_group=parallel_state.get_expert_data_parallel_group(),
    )


def names() -> dict[str, str]:
    """Return what the groups of this rank divide, by torch's name of each group."""
    known = {
        parallel_state.get_pipeline_model_parallel_group(): "pipeline",
        parallel_state.get_data_parallel_group(): "data",
        parallel_state.get_data_parallel_group(with_context_parallel=True): "data",
        parallel_state.get_context_parallel_group(): "context",
        parallel_state.get_tensor_and_context_parallel_group(): "tensor",
        parallel_state.get_tensor_model_parallel_group(): "tensor",
        parallel_state.get_model_parallel_group(): "model",
    }
    experts = {
        parallel_state.get_expert_tensor_and_model_parallel_group(): "expert",
        parallel_state.get_expert_data_parallel_group(): "data",
    }
    known = {**experts, **known}
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    if embedding is not None:  # the ranks of the first and the last stage
        known.setdefault(embedding, "embedding")
    return {group.group_name: name for group, name in known.items()}


def value_of_rank_0(value: Any) -> Any:
    """Return the value of rank 0 on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def values(value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def any_rank(flag: bool, view: ParallelView) -> bool:
    """Return on every rank whether `flag` is true on any rank; waits for all ranks."""
    if view.world_size == 1:
        return flag
    largest_flag = torch.tensor(float(flag), device=view.device)
    dist.all_reduce(largest_flag, op=dist.ReduceOp.MAX)
    return bool(largest_flag.item())


def of_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank, however long it takes."""
    return cast(T, of_ranks(lambda: action() if dist.get_rank() == 0 else None)[0])


def of_ranks(action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return all results in rank order, however long it takes.

    Ranks wait in a group of their own, because they would run into the timeout of the training's
    group. NCCL would also keep their GPUs busy. The end of a rank ends the wait with an error.
    """
    waiting = dist.new_group(backend="gloo", timeout=timedelta(days=_PATIENCE_DAYS))
    results: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(results, action(), group=waiting)
    finally:
        dist.destroy_process_group(waiting)
    return results


def stop(*, keep_process_group: bool = False) -> None:
    """Leave the parallel groups, and the process group unless another layout follows."""
    compat.close_process_groups()
    if not keep_process_group and dist.is_initialized():
        dist.destroy_process_group()
