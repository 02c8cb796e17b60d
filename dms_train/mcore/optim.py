"""Gradient buckets, AdamW and its learning-rate schedule; megatron's own, configured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from dms_train.mcore.options import OptimOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The schedule of one stage: linear warm-up, then constant or cosine to `min_lr`."""

    max_lr: float
    min_lr: float
    steps: int
    warmup_steps: int
    style: Literal["constant", "cosine"]


def wrap_chunks(config: Any, models: list[Any]) -> list[Any]:
    """Mixed-precision and data-parallel wrappers around this rank's model chunks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [Float16Module(config, model) if config.bf16 else model for model in models]
    return [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(wrapped)
    ]


def build_optimizer(options: OptimOptions, chunks: list[Any], *, bf16: bool) -> Any:
    """The distributed AdamW over the wrapped chunks."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=bf16,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, chunks)


def build_scheduler(optimizer: Any, rate: LearningRate, weight_decay: float) -> Any:
    """Megatron's scheduler; `set_step` makes it a function of the step alone."""
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
