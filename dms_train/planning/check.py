"""Checks that the blocks of a configuration fit each other, the model and the processes.

Every rule yields one line: what is wrong, where, and how to fix it. Nothing is read from disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from dms_train.config.build import ConfigError
from dms_train.config.ranges import check_ranges
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.limits import OneOf
from dms_train.mcore.options import PLAIN_LORA
from dms_train.method.schedule import layer_weights
from dms_train.planning import divide, layouts
from dms_train.planning.gpus import GPUS
from dms_train.training.options import EVICTING_STAGES, STAGES, TEACHER_LOGITS


def check(
    config: RunConfig,
    *,
    world_size: int,
    architecture: Architecture,
    processes_per_host: int | None = None,
) -> None:
    """Refuse a configuration that would fail or be meaningless.

    Args:
        config: The configuration.
        world_size: Number of processes that will run it.
        architecture: The model's, read from `model.path` or taken from `model.architecture`.
        processes_per_host: Number of processes on each host; None if it is not known.

    Raises:
        ConfigError: One line for every problem. Sizes are checked only if each value is in its own
            range, and memory (where `cluster.gpu` is set) only if all other checks pass.
    """
    problems = [
        *check_ranges(config, architecture),
        *_gpu_name(config),
        *_adapters(config),
        *(_fp8(config, architecture) if config.parallel.fp8 else ()),
        *_moments(config),
        *_stages(config),
    ]
    if not problems:
        problems = [
            *_divided(config, world_size, architecture),
            *_on_one_host(config, world_size, processes_per_host),
            *_lengths(config, architecture),
            *_cuda_graph(config, world_size, architecture),
            *_layer_ratios(config, architecture),
        ]
    if not problems and config.cluster.gpu is not None:
        problems = layouts.memory_problems(
            config, architecture, world_size, GPUS[config.cluster.gpu]
        )
    if problems:
        raise ConfigError(*problems)


def _gpu_name(config: RunConfig) -> Iterator[str]:
    refusal = OneOf(None, *GPUS).refusal(config.cluster.gpu)
    if refusal is not None:
        yield f"cluster.gpu={config.cluster.gpu}: {refusal}"


def _adapters(config: RunConfig) -> Iterator[str]:
    train = config.method.train
    if config.lora != PLAIN_LORA and train != "lora":
        yield (
            f"lora: method.train={train} has no low-rank adapters; set method.train=lora, or leave "
            "lora at its defaults"
        )
    if config.parallel.layers == "transformer_engine" and config.trainable.adapts:
        yield (
            f"parallel.layers=transformer_engine: the adapters of method.train={train} read norms "
            "that Transformer Engine does not return; use parallel.layers=auto"
        )


def _fp8(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield one line for everything that has no FP8 products."""
    where, gpu = "parallel.fp8=true", GPUS.get(config.cluster.gpu or "")
    if config.trainable.adapts:
        yield (
            f"{where}: method.train={config.method.train} runs megatron-core's own layers, which "
            "have no FP8 products; set parallel.fp8=false"
        )
    if architecture.experts is not None:
        yield f"{where}: experts have no FP8 products; set it to false"
    if TEACHER_LOGITS in config.stage.run:
        yield f"{where}: teacher_logits stores what bf16 products compute; set it to false"
    if gpu is not None and not gpu.has_fp8:
        yield f"{where}: {gpu.label} has no FP8 products; set it to false"


def _moments(config: RunConfig) -> Iterator[str]:
    """Refuse bf16 moments of fp32 weights, of which FusedAdam would save an old copy."""
    optim, dtype = config.optim, config.parallel.params_dtype
    if optim.state_dtype == "bf16" and dtype != "bf16" and not optim.offload:
        yield (
            f"optim.state_dtype=bf16: needs bf16 weights and parallel.params_dtype={dtype}; set "
            "that to bf16, or optim.state_dtype=fp32"
        )


def _divided(config: RunConfig, world_size: int, architecture: Architecture) -> Iterator[str]:
    """Yield the sizes that do not divide, followed by the nearest layout that divides."""
    problems = list(divide.problems(config, world_size, architecture))
    yield from problems
    name = config.cluster.gpu
    if problems and name is not None:
        yield layouts.advice(config, architecture, world_size, GPUS[name])


def _on_one_host(
    config: RunConfig, world_size: int, processes_per_host: int | None
) -> Iterator[str]:
    """Refuse `tp_comm_overlap` between hosts, whose GPUs cannot read one another's memory."""
    local, tp = processes_per_host, config.parallel.tensor_model_parallel_size
    if config.parallel.tp_comm_overlap and local is not None and local < world_size and local % tp:
        yield (
            f"parallel.tp_comm_overlap=true: needs each tensor-parallel group on one host, and "
            f"hosts of {local} process(es) do not divide into groups of {tp}; set it to false, or "
            f"parallel.tensor_model_parallel_size to a divisor of {local}"
        )


def _lengths(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    length = config.data.seq_length
    longest, window = architecture.max_position_embeddings, config.method.window
    if length > longest:
        yield (
            f"data.seq_length={length}: the model reads at most {longest} positions; use fewer, or "
            "set model.max_position_embeddings"
        )
    if set(EVICTING_STAGES) & set(config.stage.run) and window >= length:
        yield (
            f"method.window={window}: not below data.seq_length={length}, so nothing could be "
            "evicted; use a smaller window or longer samples"
        )


def _cuda_graph(config: RunConfig, world_size: int, a: Architecture) -> Iterator[str]:
    if config.parallel.cuda_graph != "always":
        return
    where = "parallel.cuda_graph=always"
    linear = a.linear is not None
    parallel, packed = config.parallel, config.data.packing
    copies = world_size // parallel.ranks_per_copy
    for obstacle in parallel.graph_obstacles(copies, a.num_experts, linear=linear, packed=packed):
        yield f"{where}: {obstacle}"


def _stages(config: RunConfig) -> Iterator[str]:
    run = config.stage.run
    if run and all(name in STAGES for name in run):
        yield from _starting_weights(config)
        yield from _kl_limit(config)
        yield from _teacher_logits(config)
        yield from _offload(config)
        yield from _validation(config)
        yield from _evaluation(config)


def _kl_limit(config: RunConfig) -> Iterator[str]:
    limit = config.stage.retrofit.max_kl
    if limit is not None and config.run.eval_samples == 0:
        yield (
            f"stage.retrofit.max_kl={limit}: is compared with the KL of validation samples, and "
            "run.eval_samples=0; raise it"
        )


def _teacher_logits(config: RunConfig) -> Iterator[str]:
    stored, batch = config.stage.teacher_logits.samples, config.data.global_batch_size
    if config.teacher.logits is not None and not config.needs_teacher:
        yield f"teacher.logits={config.teacher.logits}: no stage to run distils; leave it out"
    if TEACHER_LOGITS not in config.stage.run:
        return
    if stored is None or stored % batch:
        yield (
            f"stage.teacher_logits.samples={'null' if stored is None else stored}: use a multiple "
            f"of data.global_batch_size={batch}, at least the samples of a later run"
        )
    if config.run.load is not None:
        yield f"run.load={config.run.load}: teacher_logits runs the original; leave it out"


def _offload(config: RunConfig) -> Iterator[str]:
    """Yield one line if no teacher has weights of its own that could be offloaded."""
    if not config.teacher.offload:
        return
    if not config.runs_teacher:
        yield "teacher.offload=true: no teacher runs beside the student; leave it out"
    elif config.shares_teacher:
        yield (
            f"teacher.offload=true: with method.train={config.method.train} the teacher shares the "
            "frozen weights of the student; leave it out"
        )


def _layer_ratios(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    ratios, target = config.stage.retrofit.layer_ratios, config.stage.retrofit.target_cr
    if not ratios:
        return
    where = "stage.retrofit.layer_ratios"
    if config.method.kind != "dms":
        yield f"{where}: method={config.method.preset} has one target for all layers; leave it out"
    elif "retrofit" not in config.stage.run:
        yield (
            f"{where}: the stage retrofit reads it; add that to stage.run (it takes no step if "
            "run.load has the ratio already), or leave it out"
        )
    else:
        try:
            layer_weights(ratios, target, architecture.method_layers)
        except ValueError as error:
            yield f"{where}: {error}"


def _validation(config: RunConfig) -> Iterator[str]:
    if "validate_export" not in config.stage.run:
        return
    wanted, built = config.stage.validate_export.samples, config.run.eval_samples
    if "export" not in config.stage.run:
        yield "stage.run: validate_export measures what export wrote; put export before it"
    if "pretrain" in config.stage.run:
        yield (
            "stage.run: validate_export measures what a retrofit changed; leave it out after "
            "pretrain"
        )
    elif config.model.path is None:
        yield "model.path: validate_export needs the original as teacher; set it, or leave it out"
    if wanted > built:
        yield (
            f"stage.validate_export.samples={wanted}: only run.eval_samples={built} validation "
            "samples exist; lower the first or raise the second"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    if "run_tasks" not in config.stage.run:
        return
    if "export" not in config.stage.run:
        yield "stage.run: run_tasks measures what export wrote; put export before it"
    if not config.stage.run_tasks.tasks:
        yield "stage.run_tasks.tasks=[]: name at least one; `dms-eval tasks` lists them"


def _starting_weights(config: RunConfig) -> Iterator[str]:
    model, run = config.model, config.stage.run
    if "pretrain" in run and config.method.train != "all":
        yield f"method.train={config.method.train}: pretrain trains all weights; set it to all"
    if (model.path is None) == (model.architecture is None):
        yield "model.path, model.architecture: set exactly one (model=hf or model=scratch)"
    elif "pretrain" not in run and model.path is None and config.run.load is None:
        other = "" if TEACHER_LOGITS in run else " or run.load"
        yield f"stage.run: {run[0]} needs weights; set model.path (model=hf){other}"
    elif model.path is None and "pretrain" not in run and config.needs_teacher:
        yield "model.path: distilling needs the original as teacher; set it, or use loss=lm"
    if "hold" in run and "retrofit" not in run and config.run.load is None:
        yield "stage.run: hold needs retrofit before it, or run.load with a retrofitted checkpoint"
