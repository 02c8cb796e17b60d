"""Configure Megatron's gradient buckets, AdamW and learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.extensions import transformer_engine as te
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version

from dms_train.mcore import compat, groups
from dms_train.mcore.errors import ModelError
from dms_train.mcore.layers import fusions
from dms_train.mcore.options import OptimOptions
from dms_train.method.plan import LearningRate

_BF16_MOMENTS = "2.1.0"  # first Transformer Engine whose FusedAdam has all arguments used here


def mixed_precision(config: TransformerConfig, models: list[Any]) -> list[Any]:
    """Wrap this rank's model chunks in Megatron's 16-bit module where configured."""
    return [Float16Module(config, model) if config.bf16 else model for model in models]


def data_parallel(
    config: TransformerConfig, chunks: list[Any], bucket_size: int | None, *, overlaps: bool
) -> list[Any]:
    """Wrap this rank's chunks in gradient buckets with fp32 reduction.

    Args:
        config: Megatron's configuration; it gets the functions that its schedules call.
        chunks: Chunks of the model.
        bucket_size: Number of parameters of a bucket; None for megatron-core's default.
        overlaps: With several copies, reduce during the backward pass, and gather the updated
            weights during the next forward pass. Call `wait_for_param_gather` before reading them
            elsewhere. Otherwise both happen between the passes.
    """
    overlap = (
        overlaps and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=bucket_size,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlap:
        # one function, or one for each chunk of the interleaved schedule
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        config.grad_sync_func = start if len(wrapped) > 1 else start[0]
    return wrapped


def wait_for_param_gather(chunks: list[Any]) -> None:
    """Wait until every rank has the weights of the last update; all ranks call it."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(options: OptimOptions, model: TransformerConfig, chunks: list[Any]) -> Any:
    """Build the distributed AdamW over the wrapped chunks."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=model.bf16,
        use_distributed_optimizer=True,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        **_moments_in_bf16(options),
    )
    place: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.offload:
        place = compat.host_optimizer(config, groups.own_processors())
    with place:
        optimizer = get_megatron_optimizer(config, chunks)
    compat.adapt_masters(optimizer)
    fusions.fuse_adam(optimizer)
    return optimizer


def _moments_in_bf16(options: OptimOptions) -> dict[str, Any]:
    """Return megatron's settings for moments in bf16; empty for fp32."""
    if options.state_dtype == "fp32":
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,  # checkpoints hold fp32 weights
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    }


def require_supported(options: OptimOptions, device: torch.device) -> None:
    """Refuse options of the optimizer's memory that need another device or package.

    Raises:
        ModelError: What is missing.
    """
    where = f"training runs on the {device.type.upper()}"
    if options.offload and device.type != "cuda":
        raise ModelError(f"optim.offload=true: needs a GPU and {where}; set it to false")
    if options.state_dtype == "fp32":
        return
    option = f"optim.state_dtype={options.state_dtype}"
    if device.type != "cuda":
        raise ModelError(f"{option}: needs a GPU and {where}; use fp32")
    if not te.HAVE_TE:
        raise ModelError(
            f"{option}: needs Transformer Engine, which cannot be imported; install it or use fp32"
        )
    if not is_te_min_version(_BF16_MOMENTS):
        raise ModelError(f"{option}: needs Transformer Engine {_BF16_MOMENTS} or newer; use fp32")


def gradient_norm(optimizer: Any) -> float:
    """Return the norm of the reduced gradients over all ranks."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


class _NotFinite(Exception):
    """Ends megatron's step between the reduced gradients and the update."""


class Update(NamedTuple):
    """Outcome of a step: the gradient norm before clipping, and whether weights changed."""

    grad_norm: float
    updated: bool


def step(optimizer: Any, finite: Callable[[], bool]) -> Update:
    """Clip and update, the same on every rank.

    Megatron applies gradients that are not finite unless a loss scaler checks them. bf16 and fp32
    have no scaler, so this function leaves weights and optimizer unchanged instead.

    Args:
        optimizer: Megatron's, with gradients.
        finite: Returns whether the loss is finite. It is called only if the norm is finite, and
            after the norm, when the GPU is idle.
    """
    norms: list[float] = []
    measure = type(optimizer).get_grad_norm

    def checked() -> float:
        norms.append(float(measure(optimizer)))
        if not (math.isfinite(norms[0]) and finite()):
            raise _NotFinite
        return norms[0]

    optimizer.get_grad_norm = checked
    try:
        optimizer.step()
    except _NotFinite:
        return Update(norms[0], updated=False)
    finally:
        del optimizer.get_grad_norm
    return Update(norms[0], updated=True)


def build_scheduler(optimizer: Any, rate: LearningRate, weight_decay: float) -> Any:
    """Build Megatron's scheduler; `set_step` makes it a function of the step alone."""
    for group in optimizer.param_groups:
        # megatron prefers a group's own limits to the limits of the scheduler
        group["max_lr"], group["min_lr"] = rate.max_lr, rate.min_lr
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate.max_lr,
        min_lr=rate.min_lr,
        lr_warmup_steps=min(rate.warmup_steps, max(0, rate.steps - 1)),
        lr_decay_steps=max(1, rate.steps),
        lr_decay_style=rate.style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def set_step(scheduler: Any, stage_step: int) -> None:
    """Set the learning rate of the step numbered `stage_step` (from 0)."""
    scheduler.num_steps = stage_step + 1
    scheduler.step(0)
