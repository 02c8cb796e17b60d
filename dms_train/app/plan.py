"""Plan of a run as text: layout, memory, operations, and the values of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from dms_train.app.plan_lines import layout_lines, layout_table, run_lines, validation_lines
from dms_train.config.build import ConfigError
from dms_train.config.ranges import check_ranges
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.limits import AUTO
from dms_train.mcore.options import ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.schedule import evicted_fraction
from dms_train.planning import divide, layouts
from dms_train.planning.check import check
from dms_train.planning.gpus import GPUS
from dms_train.planning.parameters import active_parameter_count, parameter_count
from dms_train.planning.run_size import taken_branches
from dms_train.planning.stored_teacher import stored_bytes, stored_tokens, token_bytes
from dms_train.training.stages import Action, Stage, build_stages

_SHOWN_STEPS = 5
_GIB = 2**30


def describe(
    config: RunConfig, architecture: Architecture, world_size: int, loaded_cr: float = 1.0
) -> str:
    """Return the plan of a configuration that passed `check`, ready to be printed.

    `loaded_cr` is the compression ratio of the student that `run.load` names.
    """
    lines = [
        *_summary(config, architecture, world_size),
        *layout_lines(config, architecture, world_size),
        *validation_lines(config, architecture, world_size),
        *run_lines(config, architecture, world_size, loaded_cr),
        f"folder  {config.run.dir}",
        "",
        *_stages(config, architecture, loaded_cr),
    ]
    return "\n".join(lines)


def advise(config: RunConfig, architecture: Architecture, world_size: int) -> None:
    """Refuse a layout that does not divide, and suggest one that does; needs no GPU name."""
    if config.cluster.gpu is not None or any(check_ranges(config, architecture)):
        return  # `check` reports what to change
    problems = list(divide.problems(config, world_size, architecture))
    if problems:
        gpu = GPUS[layouts.ASSUMED_GPU]
        raise ConfigError(*problems, layouts.advice(config, architecture, world_size, gpu))


def ranked(
    config: RunConfig, architecture: Architecture, world_size: int, count: int
) -> Iterator[str]:
    """Check everything except the layout, then return the table of layouts."""
    whole = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        sequence_parallel=False,
        tp_comm_overlap=False,
    )
    elsewhere = replace(
        config,
        parallel=whole,
        data=replace(config.data, micro_batch_size=1),
        cluster=replace(config.cluster, gpu=None),
    )
    check(elsewhere, world_size=1, architecture=architecture)
    return layout_table(config, architecture, world_size, count)


def with_student(config: RunConfig) -> tuple[RunConfig, float]:
    """Read the student that `run.load` names.

    Returns:
        The configuration with the student's channel in place of `auto`, and the student's
        compression ratio; 1 without a student.
    """
    if config.run.load is None:
        return config, 1.0
    from dms_train.app import start_point  # needs torch

    original, load = start_point.find_start(config), Path(config.run.load)
    start = start_point.with_student(original, load, config.trainable)
    method = start_point.with_known_channel(config.method, start.spec)
    return replace(config, method=method), start.state.loaded_cr


def _summary(config: RunConfig, a: Architecture, world_size: int) -> Iterator[str]:
    p, data = config.parallel, config.data
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    context = f" x CP {p.context_parallel_size}" if p.context_parallel_size > 1 else ""
    copies = world_size // p.ranks_per_copy
    passes = data.global_batch_size // (data.micro_batch_size * copies)
    active = f", {active_parameter_count(a):,} of them active" if a.experts else ""
    yield (
        f"model   {a.family}, {parameter_count(a):,} parameters{active}: {a.num_layers} layers, "
        f"hidden {a.hidden_size}, {a.num_attention_heads} query and {a.num_query_groups} KV heads "
        f"of {a.kv_channels}"
    )
    stages = p.stage_layers(a.num_layers)
    layers = (
        f"{' + '.join(map(str, stages))} layers" if p.is_uneven else f"{stages[0]} layers a stage"
    )
    chunks = p.virtual_pipeline_model_parallel_size or 1
    yield (
        f"layout  {world_size} processes = TP {tp}{context} x PP {pp} x DP {copies}, "
        f"{p.params_dtype}, {layers}{f' in {chunks} chunks' if chunks > 1 else ''}"
        f"{', sequence parallel' if p.sequence_parallel else ''}"
        f"{', overlapped' if p.tp_comm_overlap else ''}"
        f"{', MLP and output projection in FP8' if p.fp8 else ''}"
        f"{_recompute(p)}"
    )
    yield (
        f"batch   {data.global_batch_size} samples of {data.seq_length} tokens "
        f"({data.global_batch_size * data.seq_length:,} tokens a step), {passes} microbatch(es) "
        f"of {data.micro_batch_size}"
    )
    values = asdict(config.method)
    preset = values.pop("preset")
    evicts = {"zero_neuron", "retrofit", "hold"} & set(config.stage.run)
    if config.method.channel == AUTO and evicts:
        values["channel"] = f"{AUTO} (ranked at the start)"
    yield f"method  {preset}: {', '.join(f'{name} {str(v).lower()}' for name, v in values.items())}"


def _recompute(parallel: ParallelOptions) -> str:
    if parallel.recompute_granularity is None:
        return ""
    modules = parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()
    return f", recompute {' '.join((parallel.recompute_granularity, *modules))}"


def _stages(config: RunConfig, a: Architecture, loaded_cr: float) -> Iterator[str]:
    warmup = config.optim.lr_warmup_steps
    stages = build_stages(config.stage, warmup, loaded_cr, a.method_layers)
    first_step = 0
    for name, stage in zip(config.stage.run, stages, strict=True):
        if not isinstance(stage, Stage):
            yield f"stage {name}: {_action(config, stage, a.vocab_size)}"
            continue
        yield f"stage {name}: {stage.steps} steps, loss {stage.loss}, lr {stage.rate.max_lr:g}"
        yield f"      step channel  decision  CR target  {config.method.verb}"
        yield from (_row(stage, first_step, index) for index in _spread(stage.steps))
        yield from _layer_ratios(stage.plan(0, max(0, stage.steps - 1)), a.method_layers)
        yield from _branches(stage)
        first_step += stage.steps


def _layer_ratios(plan: StepPlan, layers: list[int]) -> Iterator[str]:
    """Describe the ratios of layers with targets of their own at the end of a stage."""
    if plan.layer_weights:
        mean = evicted_fraction(plan.target_cr)
        ratios = {layer: 1 / (1 - mean * plan.layer_weights[layer]) for layer in layers}
        shown = ", ".join(f"{layer}: {ratio:.3g}" for layer, ratio in ratios.items())
        yield f"      CR by layer: {shown}"


def _branches(stage: Stage) -> Iterator[str]:
    """Describe the branches that the annealing takes."""
    for _, ratio in taken_branches(stage):
        steps = stage.branches[ratio].steps
        yield f"      branch at CR {ratio}: {steps} steps, then the export cr{ratio}"


def _action(config: RunConfig, action: Action, vocab_size: int) -> str:
    if action == "export":
        return f"format {config.stage.export.format}"
    if action == "teacher_logits":
        samples, k = config.stage.teacher_logits.samples, stored_tokens(config, vocab_size)
        size = f"{stored_bytes(config, vocab_size) / _GIB:,.2f} GiB in all"
        return f"{samples} samples, {k} tokens of a position in {token_bytes(k)} bytes; {size}"
    if action == "run_tasks":
        return f"tasks {', '.join(config.stage.run_tasks.tasks)}"
    options = config.stage.validate_export
    problems = "" if options.problems is None else f", problems of {options.problems}"
    return f"{options.samples} samples{problems}"


def _row(stage: Stage, first_step: int, index: int) -> str:
    plan = stage.plan(first_step + index, index)
    return (
        f"{plan.step + 1:>10}  {plan.channel_scale:6.3f}  {plan.eviction:>8}  "
        f"{plan.target_cr:9.3f}  {evicted_fraction(plan.target_cr):7.3f}"
    )


def _spread(steps: int) -> list[int]:
    """Return up to five step numbers from the first to the last."""
    last = steps - 1
    return sorted(
        {round(last * i / (_SHOWN_STEPS - 1)) for i in range(_SHOWN_STEPS)} if steps else ()
    )
