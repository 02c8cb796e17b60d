"""Checks that a parallel layout divides the model, the batch and the processes."""

from __future__ import annotations

from collections.abc import Iterator

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import FP8_MULTIPLE, VOCABULARY_MULTIPLE, ParallelOptions
from dms_train.planning.trained import trained_layers


def problems(config: RunConfig, world_size: int, architecture: Architecture) -> Iterator[str]:
    """Yield one line for everything that does not divide: where, and how to fix it.

    Args:
        config: A configuration each of whose values is in its range.
        world_size: Number of processes.
        architecture: The model's.
    """
    yield from _split_model(config, architecture)
    yield from _split_batch(config, world_size)


def _split_model(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    parallel, length = config.parallel, config.data.seq_length
    tp = parallel.tensor_model_parallel_size
    where = f"parallel.tensor_model_parallel_size={tp}"
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        size = getattr(architecture, name)
        if size % tp:
            yield f"{where}: does not divide the model's {name}={size}; use a divisor of it"
    if VOCABULARY_MULTIPLE % tp:
        yield f"{where}: use a divisor of {VOCABULARY_MULTIPLE}, to which the vocabulary is padded"
    if parallel.sequence_parallel and tp == 1:
        yield f"parallel.sequence_parallel=true: needs {where.partition('=')[0]} above 1"
    if parallel.tp_comm_overlap and not parallel.sequence_parallel:
        yield "parallel.tp_comm_overlap=true: needs parallel.sequence_parallel=true; set that too"
    shards = parallel.context_parallel_size * (tp if parallel.sequence_parallel else 1)
    if length % shards:
        kind = "context" if parallel.context_parallel_size > 1 else "sequence"
        where = f"data.seq_length={length}"
        yield f"{where}: {kind} parallelism needs a multiple of {shards}; change it"
    elif parallel.fp8:
        yield from _split_fp8(config, architecture, shards)
    yield from _split_heads(parallel, architecture)
    uneven = list(_split_layers(parallel, architecture.num_layers))
    yield from uneven or _trains_every_stage(config, architecture)
    yield from _split_experts(parallel, architecture)


def _split_fp8(config: RunConfig, a: Architecture, shards: int) -> Iterator[str]:
    """Yield the sizes of FP8 products on a rank that are no multiple of `FP8_MULTIPLE`."""
    tp, length = config.parallel.tensor_model_parallel_size, config.data.seq_length
    if length % (shards * FP8_MULTIPLE):
        yield (
            f"data.seq_length={length}: FP8 products (parallel.fp8=true) need a multiple of "
            f"{shards * FP8_MULTIPLE}, {FP8_MULTIPLE} tokens on each rank; change it"
        )
    sizes = {
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size / tp,
        "num_attention_heads x kv_channels": a.num_attention_heads * a.kv_channels / tp,
        "channels of linear attention": 0 if a.linear is None else a.linear.values / tp,
    }
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            yield (
                f"parallel.fp8=true: the model's {name} on a tensor-parallel rank is {size:g}, and "
                f"FP8 products need a multiple of {FP8_MULTIPLE}; use a smaller "
                "parallel.tensor_model_parallel_size, or set it to false"
            )


def _trains_every_stage(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Refuse a pipeline stage without trained weights, because its optimizer cannot be saved."""
    parallel, train = config.parallel, config.method.train
    trained = trained_layers(architecture, train)
    idle = [
        stage
        for stage, chunks in enumerate(parallel.stage_chunks(architecture.num_layers))
        if not any(layer in chunk for chunk in chunks for layer in trained)
    ]
    if idle:
        yield (
            f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: "
            f"method.train={train} trains only the layers {_listed(trained)}, and these stages "
            f"hold none of them: {_listed(idle)}; use fewer stages or method.train=all, or move "
            "layers with parallel.num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage"
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _split_heads(parallel: ParallelOptions, architecture: Architecture) -> Iterator[str]:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = architecture.num_query_groups
    if heads % tp == 0 and heads % (tp * cp):
        yield (
            f"parallel.context_parallel_size={cp}: does not divide the {heads // tp} KV heads of a "
            f"tensor-parallel rank; use a divisor of {heads // tp}"
        )
    linear = architecture.linear
    if linear is not None and linear.key_heads % (tp * cp):
        yield (
            f"parallel: tensor x context size is {tp * cp}, which does not divide the "
            f"{linear.key_heads} key heads of linear attention; use a divisor"
        )


def _split_experts(parallel: ParallelOptions, architecture: Architecture) -> Iterator[str]:
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    where, experts = f"parallel.expert_model_parallel_size={ep}", architecture.experts
    if experts is None:
        if ep > 1:
            yield f"{where}: {architecture.family} models have no experts; use 1"
        return
    if parallel.recomputes("mlp"):
        yield (
            "parallel.recompute_modules: experts are not recomputed alone; use [core_attn], or "
            "parallel.recompute_granularity=full"
        )
    if experts.count % ep:
        yield f"{where}: does not divide the model's {experts.count} experts; use a divisor of it"
    for name in ("ffn_hidden_size", "shared_ffn_hidden_size"):
        size = getattr(experts, name)
        if size % tp:
            yield (
                f"parallel.tensor_model_parallel_size={tp}: does not divide the model's "
                f"experts.{name}={size}; use a divisor of it"
            )
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false: experts need it with "
            f"parallel.tensor_model_parallel_size={tp}; set it to true"
        )


def _split_layers(parallel: ParallelOptions, layers: int) -> Iterator[str]:
    pp, vp = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    if vp is not None and pp == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size={vp}: needs "
            "parallel.pipeline_model_parallel_size above 1; use null without a pipeline"
        )
    if parallel.is_uneven:
        yield from _split_unevenly(parallel, layers)
        return
    chunks = pp * (vp or 1)
    if layers % chunks:
        yield (
            f"parallel.pipeline_model_parallel_size={pp}: the model's {layers} layers do not "
            f"divide into {chunks} chunks; choose pipeline x virtual size that divides {layers}, "
            "or set parallel.num_layers_in_first_pipeline_stage and the same for the last stage"
        )


def _split_unevenly(parallel: ParallelOptions, layers: int) -> Iterator[str]:
    pp, vp = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
    )
    where = "parallel.num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage"
    if pp == 1:
        yield (
            f"{where}: need parallel.pipeline_model_parallel_size above 1; use null without a "
            "pipeline"
        )
        return
    stages = parallel.stage_layers(layers)
    if sum(stages) != layers or min(stages) < 1:
        yield (
            f"{where}: the other stages cannot share the rest of the model's {layers} layers "
            f"evenly (layers by stage: {', '.join(map(str, stages))}); change one of the numbers"
        )
    elif any(count % vp for count in stages):
        yield (
            f"{where}: {', '.join(map(str, stages))} layers by stage do not divide into {vp} "
            "chunks each; use multiples of parallel.virtual_pipeline_model_parallel_size"
        )


def _split_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    pp, vp = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    model_size = parallel.ranks_per_copy
    if world_size % model_size:
        yield (
            f"parallel: tensor x pipeline x context size is {model_size}, which does not divide "
            f"the {world_size} process(es); start a multiple of {model_size} or change the layout"
        )
        return
    copies, ep = world_size // model_size, parallel.expert_model_parallel_size
    sharing = copies * parallel.context_parallel_size
    if sharing % ep:
        yield (
            f"parallel.expert_model_parallel_size={ep}: does not divide the data-parallel x "
            f"context-parallel size {sharing}; use a divisor of it"
        )
    per_pass = data.micro_batch_size * copies
    if data.global_batch_size % per_pass:
        yield (
            f"data.global_batch_size={data.global_batch_size}: not a multiple of "
            f"micro_batch_size x data-parallel size = {data.micro_batch_size} x {copies}; "
            f"use a multiple of {per_pass}"
        )
    elif vp is not None and (data.global_batch_size // per_pass) % pp:
        yield (
            f"data.global_batch_size={data.global_batch_size}: the virtual pipeline needs a "
            f"number of microbatches that {pp} divides; use a multiple of {per_pass * pp}"
        )
