"""Whether each value of a configuration is one that its key can take, looked at alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from dms_train.config.gpus import GPUS
from dms_train.config.schema import RunConfig
from dms_train.data.options import DataOptions
from dms_train.evaluation.options import check_options
from dms_train.hf.architecture import Architecture, family_of
from dms_train.kernels.options import KERNELS
from dms_train.mcore.options import LAYERS
from dms_train.training.options import RetrofitOptions

_LOSSES = ("distill", "lm")
_SEEDS = 2**32
_SIDE_ROW = 9  # mcore/stage_tensor.py: 3 sums in 3 parts
_DTYPES = ("fp32", "bf16")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "kernels": KERNELS,
    "stage.zero_neuron.loss": _LOSSES,
    "stage.retrofit.loss": _LOSSES,
    "stage.hold.loss": _LOSSES,
    "stage.export.format": (None, "dms", "nvidia", "fastdms"),
    "stage.export.dtype": (None, *_DTYPES),
    "parallel.params_dtype": _DTYPES,
    "parallel.layers": LAYERS,
    "parallel.recompute_granularity": (None, "selective", "full"),
    "observe.wandb": ("offline", "online", "disabled"),
    "run.resume": ("auto", "never"),
    "cluster.gpu": (None, *GPUS),
}
_AT_LEAST = {
    "stage.pretrain.steps": 1,
    "stage.zero_neuron.steps": 0,
    "stage.retrofit.steps_per_cr": 1,
    "stage.retrofit.start_cr": 1,
    "stage.retrofit.target_cr": 1,
    "stage.hold.steps": 1,
    "stage.export.paged_attention_block_size": 1,
    "data.seq_length": 1,
    "data.micro_batch_size": 1,
    "data.global_batch_size": 1,
    "parallel.tensor_model_parallel_size": 1,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.virtual_pipeline_model_parallel_size": 2,
    "parallel.recompute_num_layers": 1,
    "optim.weight_decay": 0,
    "optim.clip_grad": 0,
    "optim.lr_warmup_steps": 0,
    "run.seed": 0,
    "run.max_skipped_steps": 1,
    "run.save_interval": 0,
    "run.keep_checkpoints": 1,
    "run.eval_interval": 0,
    "run.eval_samples": 0,
    "run.log_interval": 1,
    "cluster.nodes": 1,
    "cluster.processes_per_node": 1,
    "cluster.gpus_per_node": 0,
    "cluster.cpus_per_node": 1,
    "cluster.signal_seconds": 1,
    "cluster.save_seconds": 1,
    "cluster.hang_seconds": 0,
    "cluster.max_failures": 0,
}
_ABOVE_ZERO = (
    "stage.pretrain.lr",
    "stage.zero_neuron.lr",
    "stage.retrofit.lr",
    "stage.hold.lr",
    "optim.lr",
    "optim.adam_eps",
    "parallel.distributed_timeout_minutes",
    "model.init_std",
    "observe.peak_tflops",
)
_SHARES = {
    "stage.pretrain.min_lr_ratio": "from 0 to 1",
    "stage.hold.min_lr_ratio": "from 0 to 1",
    "optim.adam_beta1": "from 0 to below 1",
    "optim.adam_beta2": "from 0 to below 1",
}


def check_ranges(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """One line for every value that is out of its range; None is always within."""
    yield from _choices(config)
    yield from _numbers(config)
    yield from _target(config.stage.retrofit)
    yield from _blend(config.data)
    yield from _architecture(architecture)
    yield from (f"stage.validate.{line}" for line in check_options(config.stage.validate))
    try:
        config.method.spec()
    except ValueError as error:
        yield str(error)


def _get(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _choices(config: RunConfig) -> Iterator[str]:
    for path, allowed in _CHOICES.items():
        value = _get(config, path)
        if value not in allowed:
            names = ", ".join("null" if choice is None else choice for choice in allowed)
            yield f"{path}={value}: choose one of {names}"


def _numbers(config: RunConfig) -> Iterator[str]:
    for path in (*_AT_LEAST, *_ABOVE_ZERO):
        value = _get(config, path)
        if value is not None and value == math.inf:
            yield f"{path}={value}: use a finite number"
    if not config.run.seed < _SEEDS:
        yield f"run.seed={config.run.seed}: use a number below {_SEEDS}"
    for path, least in _AT_LEAST.items():
        value = _get(config, path)
        if value is not None and not value >= least:
            yield f"{path}={value}: use at least {least}"
    for path in _ABOVE_ZERO:
        value = _get(config, path)
        if value is not None and not value > 0:
            yield f"{path}={value}: use a number above 0"
    for path, words in _SHARES.items():
        value = _get(config, path)
        if not 0 <= value <= 1 or (value == 1 and "below" in words):
            yield f"{path}={value}: use a number {words}"


def _target(retrofit: RetrofitOptions) -> Iterator[str]:
    if retrofit.start_cr is not None and not retrofit.target_cr >= retrofit.start_cr:
        yield (
            f"stage.retrofit.target_cr={retrofit.target_cr}: below "
            f"stage.retrofit.start_cr={retrofit.start_cr}; anneal upwards"
        )


def _blend(data: DataOptions) -> Iterator[str]:
    if not data.paths:
        yield "data.paths=[]: name at least one prefix of a .bin/.idx pair"
    if data.weights is not None:
        if len(data.weights) != len(data.paths):
            yield (
                f"data.weights: {len(data.weights)} weight(s) for {len(data.paths)} path(s); "
                "give one for each, or null to blend by size"
            )
        if not all(weight > 0 for weight in data.weights):
            yield f"data.weights={list(data.weights)}: use numbers above 0"
    if not _is_split(data.split):
        yield f"data.split={data.split}: use train,validation,test shares such as '98,2,0'"


def _is_split(text: str) -> bool:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        return False
    return len(shares) == 3 and shares[0] > 0 and min(shares) >= 0


def _architecture(architecture: Architecture) -> Iterator[str]:
    for field in fields(architecture):
        value = getattr(architecture, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            yield f"model.architecture.{field.name}={value}: use a number above 0"
    if architecture.hidden_size < _SIDE_ROW:
        yield (
            f"model.architecture.hidden_size={architecture.hidden_size}: use at least {_SIDE_ROW}; "
            "side sums travel between pipeline stages in a row of that width"
        )
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    if groups > 0 and heads % groups:
        yield (
            f"model.architecture.num_query_groups={groups}: does not divide "
            f"num_attention_heads={heads}; use a divisor of it"
        )
    if architecture.kv_channels % 2:
        yield f"model.architecture.kv_channels={architecture.kv_channels}: use an even head size"
    try:
        family_of({"model_type": architecture.family})
    except ValueError as error:
        yield f"model.architecture.family={architecture.family}: {str(error).rpartition('; ')[2]}"
