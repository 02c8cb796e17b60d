"""`dms-plan`: what a run would do, computed without starting a process group.

Prints the layout, the memory of every pipeline stage by kind, operations and expected time of a
step, and the values of five steps of every stage. `--list-layouts` ranks the layouts there are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dms_train.cli.config_source import compose
from dms_train.cli.errors import run_main
from dms_train.cli.model import read_architecture
from dms_train.cli.plan_lines import layout_lines, layout_table
from dms_train.config import divide, layouts
from dms_train.config.build import ConfigError
from dms_train.config.check import check
from dms_train.config.gpus import GPUS, gpu
from dms_train.config.memory import parameter_count
from dms_train.config.ranges import check_ranges
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.method.schedule import evicted_fraction
from dms_train.training.stages import Action, Stage, build_stages

_SHOWN_STEPS = 5
_HEADER = "      step  neuron  eviction  CR target  evicted"


def main() -> None:
    """Entry point; exit code 0, or 2 for a refused configuration."""
    sys.exit(run_main(lambda: _main(sys.argv[1:])))


def describe(
    config: RunConfig, architecture: Architecture, world_size: int, loaded_cr: float = 1.0
) -> str:
    """The plan of a configuration that passed `check`, ready to be printed.

    `loaded_cr` is the compression ratio of the student that `run.load` names.
    """
    lines = [
        *_summary(config, architecture, world_size),
        *layout_lines(config, architecture, world_size),
        f"folder  {config.run.dir}",
        "",
        *_stages(config, loaded_cr),
    ]
    return "\n".join(lines)


def _main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    config = compose(options.overrides, options.config_dir)
    parallel = config.parallel
    layout = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    world_size = options.world_size or max(1, layout)
    architecture = read_architecture(config.model)
    if options.gpu is not None:
        gpu(options.gpu)
        config = replace(config, cluster=replace(config.cluster, gpu=options.gpu))
    if options.list_layouts is not None:
        print("\n".join(_ranked(config, architecture, world_size, options.list_layouts)))
        return 0
    _advise(config, architecture, world_size)
    check(config, world_size=world_size, architecture=architecture)
    print(describe(config, architecture, world_size, _loaded_cr(config)))
    return 0


def _advise(config: RunConfig, architecture: Architecture, world_size: int) -> None:
    """Refuse what does not divide with a layout that does, also where no GPU is named."""
    if config.cluster.gpu is not None or any(check_ranges(config, architecture)):
        return  # `check` has an answer
    problems = list(divide.problems(config, world_size, architecture))
    if problems:
        gpu = GPUS[layouts.ASSUMED_GPU]
        raise ConfigError(*problems, layouts.advice(config, architecture, world_size, gpu))


def _ranked(
    config: RunConfig, architecture: Architecture, world_size: int, count: int
) -> Iterator[str]:
    """The table of layouts, once all but the layout is known to be right."""
    whole = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        sequence_parallel=False,
    )
    elsewhere = replace(
        config,
        parallel=whole,
        data=replace(config.data, micro_batch_size=1),
        cluster=replace(config.cluster, gpu=None),
    )
    check(elsewhere, world_size=1, architecture=architecture)
    return layout_table(config, architecture, world_size, count)


def _loaded_cr(config: RunConfig) -> float:
    if config.run.load is None:
        return 1.0
    from dms_train.cli.start_point import find_start, with_student  # needs torch

    return with_student(find_start(config), Path(config.run.load)).state.loaded_cr


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: say a number from 1")
    return int(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dms-plan", description="Show what a run would do.")
    parser.add_argument("overrides", nargs="*", help="the words that dms-train would be given")
    parser.add_argument("--world-size", type=_count, help="processes (default: tensor x pipeline)")
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"{', '.join(GPUS)}; refuses what does not fit it"
    )
    parser.add_argument(
        "--list-layouts",
        type=_count,
        nargs="?",
        const=10,
        metavar="N",
        help="the fastest N layouts (default 10) that divide and fit, instead of the plan",
    )
    parser.add_argument("--config-dir", type=Path, help="folder with group files of your own")
    return parser.parse_intermixed_args(arguments)


def _summary(config: RunConfig, a: Architecture, world_size: int) -> Iterator[str]:
    p, data, spec = config.parallel, config.data, config.method.spec()
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    copies = world_size // (tp * pp)
    passes = data.global_batch_size // (data.micro_batch_size * copies)
    yield (
        f"model   {a.family}, {parameter_count(a):,} parameters: {a.num_layers} layers, hidden "
        f"{a.hidden_size}, {a.num_attention_heads} query and {a.num_query_groups} KV heads "
        f"of {a.kv_channels}"
    )
    layers = a.num_layers // pp
    chunks = p.virtual_pipeline_model_parallel_size or 1
    yield (
        f"layout  {world_size} processes = TP {tp} x PP {pp} x DP {copies}, {p.params_dtype}, "
        f"{layers} layers a stage{f' in {chunks} chunks' if chunks > 1 else ''}"
        f"{', sequence parallel' if p.sequence_parallel else ''}"
        f"{f', recompute {p.recompute_granularity}' if p.recompute_granularity else ''}"
    )
    yield (
        f"batch   {data.global_batch_size} samples of {data.seq_length} tokens "
        f"({data.global_batch_size * data.seq_length:,} tokens a step), {passes} microbatch(es) "
        f"of {data.micro_batch_size}"
    )
    yield (
        f"method  {spec.preset}: window {spec.window}, channel {spec.channel}, "
        f"logit = {spec.alpha_scale:g} q - {spec.alpha_offset:g}, shift {spec.decision_shift}"
    )


def _stages(config: RunConfig, loaded_cr: float) -> Iterator[str]:
    optim = config.optim
    stages = build_stages(config.stage, optim.lr, optim.lr_warmup_steps, loaded_cr)
    done = 0
    for name, stage in zip(config.stage.run, stages, strict=True):
        if not isinstance(stage, Stage):
            yield f"stage {name}: {_action(config, stage)}"
            continue
        yield f"stage {name}: {stage.steps} steps, loss {stage.loss}, lr {stage.rate.max_lr:g}"
        yield _HEADER
        yield from (_row(stage, done, index) for index in _spread(stage.steps))
        done += stage.steps


def _action(config: RunConfig, action: Action) -> str:
    if action == "export":
        return f"format {config.stage.export.format or 'of the preset'}"
    options = config.stage.validate
    problems = "" if options.problems is None else f", problems of {options.problems}"
    return f"{options.samples} samples{problems}"


def _row(stage: Stage, done: int, index: int) -> str:
    plan = stage.plan(done + index, index)
    return (
        f"{plan.step + 1:>10}  {plan.neuron_scale:6.3f}  {plan.eviction:>8}  "
        f"{plan.target_cr:9.3f}  {evicted_fraction(plan.target_cr):7.3f}"
    )


def _spread(steps: int) -> list[int]:
    """Up to five step numbers from the first to the last."""
    last = steps - 1
    return sorted(
        {round(last * i / (_SHOWN_STEPS - 1)) for i in range(_SHOWN_STEPS)} if steps else ()
    )
