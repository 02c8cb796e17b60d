"""Lines of `dms-plan` about layouts: memory by kind, operations, expected time; a ranked table."""

from __future__ import annotations

from collections.abc import Iterator

from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.planning import layouts, validation_memory
from dms_train.planning.flops import forward_flops_per_token, student_flops_per_token
from dms_train.planning.gpus import GPUS, Gpu, calibration
from dms_train.planning.layouts import Layout
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.run_size import run_size

_GIB = 2**30
_HOUR = 3600
# A faster layout is suggested if it saves at least this share of a step.
_WORTH_CHANGING = 0.05


def _chosen(config: RunConfig) -> Gpu:
    return GPUS[config.cluster.gpu or layouts.ASSUMED_GPU]


def layout_lines(config: RunConfig, architecture: Architecture, world_size: int) -> Iterator[str]:
    """Return memory by stage, and operations and time of a step; `check` must have passed."""
    gpu, c = _chosen(config), calibration()
    layout = layouts.planned(config, architecture, world_size, gpu)
    per_stage = world_size // len(layout.stages)
    yield "memory  of a GPU, by pipeline stage (GiB):"
    names = list(layout.stages[0].kinds())
    yield "      stage     ranks  " + "  ".join(f"{name:>11}" for name in (*names, "in all"))
    needed = layout.by_stage(c)
    for number, stage in enumerate(layout.stages):
        ranks = f"{number * per_stage}-{(number + 1) * per_stage - 1}"
        sizes = (*stage.kinds().values(), needed[number])
        yield f"{number + 1:>11}  {ranks:>8}  " + "  ".join(
            f"{size / _GIB:>11.2f}" for size in sizes
        )
    yield f"        in all: with the allocator's fragmentation and {_of_gpu(config, layout)}"
    if config.teacher.offload:
        host = max(stage.pinned_bytes for stage in stages_of(config, architecture, world_size))
        yield f"        of the host: {host / _GIB:.2f} pinned by a process for the teacher's layers"
    if config.optim.offload:
        stages = stages_of(config, architecture, world_size)
        host = max(stage.host_optimizer_bytes for stage in stages)
        yield f"        of the host: {host / _GIB:.2f} of a process for fp32 weights and moments"
    yield _operations(config, architecture, world_size, layout)
    shares = ", ".join(f"{name} {value:.3g}" for name, value in layout.time.kinds().items())
    yield f"time    {layout.time.total:.3g} s a step on {gpu.label}: {shares}"


def _of_gpu(config: RunConfig, layout: Layout) -> str:
    gpu, needed = _chosen(config), layout.needed(calibration())
    share = f"{needed / gpu.memory:.0%} of a {gpu.label} ({gpu.memory_gib:.1f} GiB)"
    fits = "" if needed <= gpu.memory else ", so it does not fit"
    assumed = "" if config.cluster.gpu else "; this GPU is assumed, name another one with --gpu"
    return f"CUDA's own; {share}{fits}{assumed}"


def _operations(
    config: RunConfig, architecture: Architecture, world_size: int, layout: Layout
) -> str:
    data = config.data
    tokens = data.global_batch_size * data.seq_length
    teacher = forward_flops_per_token(architecture, data.seq_length) * config.runs_teacher
    student = student_flops_per_token(
        architecture, data.seq_length, config.trainable, config.method
    )
    flops = tokens * (student + teacher)
    rate = flops / world_size / layout.time.total / 1e12
    return (
        f"work    {flops / 1e15:.3g} PFLOP a step ({_student_words(config)}"
        f"{', 2N teacher' if teacher else ''}, attention); expected "
        f"{rate:.0f} TFLOP/s and {tokens / world_size / layout.time.total:,.0f} tokens/s a GPU"
    )


def _student_words(config: RunConfig) -> str:
    train = config.method.train
    return "6N student" if train == "all" else f"4N student and gradients of method.train={train}"


def run_lines(
    config: RunConfig, architecture: Architecture, world_size: int, loaded_cr: float
) -> Iterator[str]:
    """Return duration and disk space of the whole run, and a layout that is faster or fits."""
    gpu, size = _chosen(config), run_size(config, architecture, loaded_cr)
    layout = layouts.planned(config, architecture, world_size, gpu)
    hours = size.steps * layout.time.total / _HOUR
    yield (
        f"run     {size.steps:,} steps in {hours:,.1f} hours, {hours * world_size:,.1f} GPU hours; "
        "evaluations, saves and exports come on top"
    )
    yield (
        f"disk    {size.disk_bytes / _GIB:,.1f} GiB: {size.checkpoints} checkpoint(s) of "
        f"{size.checkpoint_bytes / _GIB:,.1f} GiB, {size.weights} stage end(s) of "
        f"{size.weights_bytes / _GIB:,.1f} GiB, {size.exports} export(s) of "
        f"{size.export_bytes / _GIB:,.1f} GiB"
    )
    fastest = next(iter(layouts.search(config, architecture, world_size, gpu)), None)
    fits = layout.needed(calibration()) <= gpu.memory  # as all that the search returns
    limit = (1 - _WORTH_CHANGING) * layout.time.total
    if fastest is not None and (not fits or fastest.time.total <= limit):
        yield (
            f"hint    {fastest.time.total:.3g} s a step with {' '.join(fastest.words(config))}; "
            "--list-layouts shows more"
        )


def validation_lines(
    config: RunConfig, architecture: Architecture, world_size: int
) -> Iterator[str]:
    """Return the memory of `validate_export`; ConfigError if the chosen GPU cannot hold it."""
    if "validate_export" not in config.stage.run:
        return
    gpu = _chosen(config)
    alone = validation_memory.needed_bytes(config, architecture)
    trained = layouts.planned(config, architecture, world_size, gpu).stages[0].fixed
    yield (
        f"memory  of validate_export: {alone / _GIB:.2f} GiB of one GPU in a job of its own, "
        f"{(alone + trained) / _GIB:.2f} GiB in the process that has trained"
    )
    problem = validation_memory.problem(config, architecture, gpu.label, gpu.memory)
    if config.cluster.gpu is not None and problem is not None:
        raise ConfigError(f"{problem}; leave validate_export out of stage.run")


def layout_table(
    config: RunConfig, architecture: Architecture, world_size: int, count: int
) -> Iterator[str]:
    """Return the fastest layouts that divide and fit, each with its overrides."""
    gpu, c = _chosen(config), calibration()
    fitting = layouts.search(config, architecture, world_size, gpu)
    if not fitting:
        yield layouts.advice(config, architecture, world_size, gpu)
        return
    yield f"{len(fitting)} layouts of {world_size} processes fit {gpu.label}; the fastest:"
    yield "  s a step  GiB a GPU  overrides"
    for layout in fitting[:count]:
        words = " ".join(layout.words(config)) or "(as it is)"
        yield f"{layout.time.total:>10.3g}  {layout.needed(c) / _GIB:>9.1f}  {words}"
