"""Parallel layouts that divide the model and the batch and fit a GPU, the fastest first.

The search varies tensor, context, pipeline and virtual pipeline size, the layers of the first and
last pipeline stage, recomputation and the size of a microbatch. The number of processes, the global
batch and the model stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.planning import divide
from dms_train.planning.flops import forward_flops_per_token
from dms_train.planning.gpus import Calibration, Gpu, calibration
from dms_train.planning.memory import MemoryEstimate, of_stage
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.step_time import StepTime, step_time

_TENSOR_SIZES = (1, 2, 4, 8)  # beyond a node the links are too slow
_CONTEXT_SIZES = (1, 2, 4, 8)
_LEAST_POSITIONS = 8192  # of a context-parallel rank; with fewer its products are small
_MOST_STAGES = 16
_VIRTUAL_SIZES = (None, 2, 4)
# granularity and modules
_RECOMPUTE = (
    (None, ("core_attn",)),
    ("selective", ("core_attn",)),
    ("selective", ("mlp",)),
    ("full", ("core_attn",)),
)
_SAMPLES = (1, 2, 4, 8)
_MOST_PROCESSES = 4096
ASSUMED_GPU = "h100"  # used while the configuration names no GPU
_GIB = 2**30


class Layout(NamedTuple):
    """A configuration that divides, with its memory and time.

    Attributes:
        config: The configuration with the layout in it.
        stages: Memory of each pipeline stage.
        time: Expected time of a step.
        world_size: Processes.
    """

    config: RunConfig
    stages: list[MemoryEstimate]
    time: StepTime
    world_size: int

    def needed(self, c: Calibration) -> float:
        """Return the bytes that the fullest GPU must have."""
        return max(self.by_stage(c))

    def by_stage(self, c: Calibration) -> list[float]:
        """Return the bytes that a GPU of each pipeline stage must have."""
        return [stage.needed(c, self.world_size) for stage in self.stages]

    def words(self, other: RunConfig) -> list[str]:
        """Return the overrides that turn `other` into this layout."""
        words = []
        for group in ("parallel", "data"):
            mine, theirs = getattr(self.config, group), getattr(other, group)
            for name in mine.__dataclass_fields__:
                value = getattr(mine, name)
                if value != getattr(theirs, name):
                    words.append(f"{group}.{name}={_word(value)}")
        return words


def _word(value: Any) -> str:
    """Format a value as an override writes it."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value).lower()


def planned(config: RunConfig, architecture: Architecture, world_size: int, gpu: Gpu) -> Layout:
    """Return the layout of a configuration that divides."""
    stages = stages_of(config, architecture, world_size)
    time = step_time(stages, gpu, calibration())
    return Layout(config, [of_stage(stage) for stage in stages], time, world_size)


def search(
    config: RunConfig, architecture: Architecture, world_size: int, gpu: Gpu
) -> list[Layout]:
    """Return all layouts that divide and fit, fastest step first."""
    c = calibration()
    layouts = (
        _if_it_fits(candidate, architecture, world_size, gpu)
        for candidate in _candidates(config, architecture, world_size)
        if not any(divide.problems(candidate, world_size, architecture))
    )
    fitting = [layout for layout in layouts if layout is not None]
    return sorted(fitting, key=lambda layout: (layout.time.total, layout.needed(c)))


def _if_it_fits(
    config: RunConfig, architecture: Architecture, world_size: int, gpu: Gpu
) -> Layout | None:
    """Plan a configuration up to its first stage that does not fit, which rules out most."""
    c = calibration()
    stages, needs = stages_of(config, architecture, world_size), []
    for stage in stages:
        needs.append(of_stage(stage))
        if needs[-1].needed(c, world_size) > gpu.memory:
            return None
    return Layout(config, needs, step_time(stages, gpu, c), world_size)


def _candidates(
    config: RunConfig, architecture: Architecture, world_size: int
) -> Iterator[RunConfig]:
    head = _head_layers(config, architecture)
    samples = sorted({*_SAMPLES, config.data.micro_batch_size})
    stages = range(1, _MOST_STAGES + 1)
    for tp, cp, pp, vp in product(_TENSOR_SIZES, _CONTEXT_SIZES, stages, _VIRTUAL_SIZES):
        if world_size % (tp * cp * pp):
            continue
        if cp > 1 and config.data.seq_length // cp < _LEAST_POSITIONS:
            continue
        splits = [(None, None), *_uneven_split(architecture.num_layers, pp, vp or 1, head)]
        # a sample is divided before several of them run at a time
        sizes = samples if cp == 1 else samples[:1]
        for (first, last), (granularity, modules), size in product(splits, _RECOMPUTE, sizes):
            parallel = replace(
                config.parallel,
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vp,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                sequence_parallel=tp > 1,
                tp_comm_overlap=config.parallel.tp_comm_overlap and tp > 1,
                recompute_granularity=granularity,
                recompute_modules=modules,
            )
            yield replace(
                config, parallel=parallel, data=replace(config.data, micro_batch_size=size)
            )


def _head_layers(config: RunConfig, architecture: Architecture) -> float:
    """Return the operations of the output head in those of a decoder layer."""
    a = architecture
    head = 2 * a.vocab_size * a.hidden_size
    layers = forward_flops_per_token(a, config.data.seq_length) - head
    return head / (layers / a.num_layers)


def _uneven_split(layers: int, pp: int, vp: int, head: float) -> list[tuple[int, int]]:
    """Return layers of the first and the last stage that balance the stages; empty if even is best.

    Args:
        layers: Layers of the model.
        pp: Pipeline stages.
        vp: Model chunks of a stage; they have equal numbers of layers.
        head: Operations of the output head in those of a layer.
    """
    splits = []
    for middle in (layers // (pp * vp) * vp, (layers // (pp * vp) + 1) * vp):
        ends = layers - middle * (pp - 2)
        for last in range(vp, ends, vp):
            stages = (ends - last, middle if pp > 2 else 0, last + head)
            splits.append((max(stages), ends - last, last))
    splits = [split for split in splits if split[1] % vp == 0]
    if pp == 1 or not splits:
        return []
    _, first, last = min(splits)
    return [] if first == last == layers / pp else [(first, last)]


def memory_problems(
    config: RunConfig, architecture: Architecture, world_size: int, gpu: Gpu
) -> list[str]:
    """Return one line if a configuration that divides does not fit; empty if it does."""
    c = calibration()
    layout = planned(config, architecture, world_size, gpu)
    needed = layout.by_stage(c)
    fullest = needed.index(max(needed))
    if needed[fullest] <= gpu.memory:
        return []
    per_stage = world_size // len(needed)
    first = fullest * per_stage
    ranks = f"ranks {first} to {first + per_stage - 1}" if per_stage > 1 else f"rank {first}"
    largest = sorted(layout.stages[fullest].kinds().items(), key=lambda item: -item[1])[:3]
    kinds = ", ".join(f"{name} {size / _GIB:.1f} GiB" for name, size in largest)
    return [
        f"parallel: pipeline stage {fullest + 1} of {len(needed)} ({ranks}) needs "
        f"{needed[fullest] / _GIB:.1f} GiB, {(needed[fullest] - gpu.memory) / _GIB:.1f} GiB more "
        f"than the {gpu.memory_gib:.1f} GiB of a {gpu.label} ({kinds}); "
        f"{advice(config, architecture, world_size, gpu)}"
    ]


def advice(config: RunConfig, architecture: Architecture, world_size: int, gpu: Gpu) -> str:
    """Return overrides of the fastest layout that fits, else the number of processes needed."""
    fitting = search(config, architecture, world_size, gpu)
    if fitting:
        words = " ".join(fitting[0].words(config))
        return (
            f"the fastest layout that divides and fits {gpu.label}: {words} "
            f"({fitting[0].time.total:.3g} s a step)"
        )
    for more in (2**n for n in range(world_size.bit_length(), _MOST_PROCESSES.bit_length())):
        fitting = search(config, architecture, more, gpu)
        if fitting:
            words = " ".join(fitting[0].words(config))
            return (
                f"no layout of {world_size} {gpu.label} divides and fits; {more} are enough"
                f"{f' with {words}' if words else ''}"
            )
    return (
        f"no layout divides and fits on up to {_MOST_PROCESSES} {gpu.label}; use a larger GPU or "
        "shorter samples"
    )
