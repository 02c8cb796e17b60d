"""Collectives of a training step in any layout, found by running a small one in one process.

Torch's `fake` backend takes part in every collective without sending anything. The real model,
optimizer and schedule therefore run as one rank of any number of ranks. Tensor, context, pipeline
and data sizes and the width of the model are those of the configuration. Counts and bytes are
linear in the layers of a chunk, in the tokens of a microbatch and in the number of microbatches.
Eight small steps measure them at two values of each, and the result is extended to the
configuration. Matrix products are replaced by zeros of their shapes. Layers with a window make no
decisions; where a model has such layers, two numbers of them are measured as well.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dms_train.config.schema import RunConfig
from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.step_time import sent_bytes

_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
# Sent bytes of a rank over the bytes of the whole tensor, times (ranks - 1) / ranks.
_RING_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
_GIGA = 1e9
_RATE = LearningRate(max_lr=1e-5, min_lr=1e-5, steps=100, warmup_steps=0, style="constant")


class Collective(NamedTuple):
    """Kind of a collective, the name of its group, and the number of ranks that take part."""

    kind: str
    group: str
    ranks: int


class Traffic(NamedTuple):
    """Amount of one collective in a step.

    Attributes:
        calls: Number of calls.
        tensor_bytes: Bytes of the whole tensors.
        sent_bytes: Bytes that this rank sends, with ring algorithms.
    """

    calls: float
    tensor_bytes: float
    sent_bytes: float


class _Recorder(TorchDispatchMode):
    """Counter of collectives; results of collectives are ones, matrix products zeros."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names
        self.calls: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            return args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
        if func.namespace == "c10d":
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(func._opname, func._opname)
        sides = [[x for x in tree_leaves(argument) if isinstance(x, Tensor)] for argument in args]
        if kind != "send":
            for tensor in sides[0]:
                tensor.fill_(1)  # the backend leaves what was in memory
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        if kind in ("send", "receive"):  # a pipeline of two also uses the group of all ranks
            collective = Collective(kind, "pipeline", 2)
        else:
            name = self._names.get(group.group_name, "all ranks")
            collective = Collective(kind, name, group.size())
        self.calls[collective] += 1
        self.bytes[collective] += max(
            sum(x.numel() * x.element_size() for x in side) for side in sides
        )


def trace(
    config: RunConfig, architecture: Architecture, world_size: int, stage: int
) -> dict[Collective, Traffic]:
    """Return the collectives of one training step on the first rank of a pipeline stage.

    Args:
        config: Configuration that passed `check`.
        architecture: Architecture of the model.
        world_size: Number of ranks.
        stage: Index of the pipeline stage.
    """
    parallel, data = config.parallel, config.data
    own = stages_of(config, architecture, world_size)[stage]
    pp, chunks = own.pp, own.pp * own.vp
    shards = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    counted: dict[tuple[int, ...], _Recorder] = {}
    even = replace(
        parallel,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        fp8=False,  # needs a GPU
    )
    with _one_process(world_size, stage * (world_size // pp)):
        for layers in product(*_small_chunks(architecture)):
            small = _small_model(architecture, layers, chunks)
            engine, names = _engine(replace(config, parallel=even), small)
            # every recorded step begins by gathering the weights that the one before it updated
            _step(engine, config, _batches(data.micro_batch_size, 2 * shards, pp), names)
            for length, count in product((2 * shards, 4 * shards), (pp, 2 * pp)):
                batches = _batches(data.micro_batch_size, length, count)
                counted[*layers, length, count] = _step(engine, config, batches, names)
            groups.stop(keep_process_group=True)
    deciding = own.method_layers / own.vp
    kinds = (deciding, own.layers - deciding)[: len(_small_chunks(architecture))]
    return _extended(counted, (*kinds, data.seq_length, own.microbatches))


def _small_chunks(architecture: Architecture) -> list[tuple[int, int]]:
    """Return two numbers of layers without a window, and two of layers with one if there are any.

    They are those of a chunk.
    """
    without = len(architecture.method_layers) == architecture.num_layers
    return [(1, 2)] if without else [(1, 2), (0, 1)]


def _small_model(architecture: Architecture, layers: tuple[int, ...], chunks: int) -> Architecture:
    """Return a model whose chunks have these numbers of layers without and with a window."""
    if len(layers) == 1:
        return replace(architecture, num_layers=layers[0] * chunks, layers=())
    kinds = [
        next(e for e in architecture.layers if (e.linear or e.window is not None) == local)
        for local in (False, True)
    ]
    chunk = [each for each, size in zip(kinds, layers, strict=True) for _ in range(size)]
    return replace(architecture, num_layers=len(chunk) * chunks, layers=tuple(chunk * chunks))


@contextmanager
def _one_process(world_size: int, rank: int) -> Iterator[None]:
    """Act as one rank of many; nothing is sent."""
    plain = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "backend": "fake"})

    def same_everywhere(gathered: list[Any], value: Any, group: Any = None) -> None:
        gathered[:] = [value] * len(gathered)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),  # advice for GPUs
        patch.object(dist, "new_group", fake_group),
        patch.object(dist, "all_gather_object", same_everywhere),
        patch.object(torch.cuda, "is_available", lambda: False),  # the step is small
    ):
        yield
    dist.destroy_process_group()


def _engine(config: RunConfig, architecture: Architecture) -> tuple[McoreEngine, dict[str, str]]:
    """Build student and teacher with weights of zero; return the names of the groups too."""
    view = groups.start(config.parallel, config.run.seed)
    method = config.method.override(channel=0)
    options = TrainEngineOptions(
        parallel=config.parallel,
        optim=config.optim,
        seed=config.run.seed,
        loss=config.loss,
        trainable=config.trainable,
    )
    engine = McoreEngine(architecture, method, view, options, None)
    for model in engine._models:
        for parameter in model.parameters():
            parameter.data.zero_()
    engine._optimizer.reload_model_params()
    if config.runs_teacher:
        engine.attach_teacher(None)
    engine.begin_stage(_RATE)
    return engine, groups.names()


def _batches(size: int, length: int, count: int) -> list[Batch]:
    tokens = torch.zeros((size, length), dtype=torch.int64)
    one = Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(size, length),
        samples=torch.arange(size),
    )
    return [one] * count


def _step(
    engine: McoreEngine, config: RunConfig, batches: list[Batch], names: Mapping[str, str]
) -> _Recorder:
    """Record one step."""
    loss = "distill" if config.runs_teacher else "lm"
    plan = StepPlan(eviction="soft", channel_scale=0.0, target_cr=2.0, loss=loss)
    with _Recorder(names) as recorder:
        engine.train_step(plan, batches)
    return recorder


def _extended(
    counted: dict[tuple[int, ...], _Recorder], target: Sequence[float]
) -> dict[Collective, Traffic]:
    found = sorted({collective for recorder in counted.values() for collective in recorder.calls})
    traffic = {}
    for collective in found:
        calls = extend({at: r.calls[collective] for at, r in counted.items()}, target)
        size = extend({at: r.bytes[collective] for at, r in counted.items()}, target)
        share = (collective.ranks - 1) / collective.ranks
        sent = _RING_PASSES.get(collective.kind, 0) * share * size
        if collective.kind == "send":
            sent = size
        traffic[collective] = Traffic(calls, size, sent)
    return traffic


def trace_lines(config: RunConfig, architecture: Architecture, world_size: int) -> Iterator[str]:
    """Return the collectives of the first and last pipeline stage, beside the plan's count."""
    stages = stages_of(config, architecture, world_size)
    for stage in dict.fromkeys((0, len(stages) - 1)):
        found = trace(config, architecture, world_size, stage)
        rank = stage * (world_size // len(stages))
        yield f"collectives of a step on rank {rank}, pipeline stage {stage + 1} of {len(stages)}:"
        yield "      kind            group      ranks     calls  tensor GB    sent GB"
        for collective, traffic in found.items():
            yield (
                f"      {collective.kind:<14}  {collective.group:<9}  {collective.ranks:>5}  "
                f"{traffic.calls:>8,.0f}  {traffic.tensor_bytes / _GIGA:>9.4f}  "
                f"{traffic.sent_bytes / _GIGA:>9.4f}"
            )
        for group, planned in sent_bytes(stages[stage])._asdict().items():
            sent = sum(t.sent_bytes for c, t in found.items() if c.group == group)
            yield f"      {group}: {sent / _GIGA:.4f} GB sent, {planned / _GIGA:.4f} planned"


def extend(values: Mapping[tuple[int, ...], float], target: Sequence[float]) -> float:
    """Evaluate at `target` the multilinear function through `values`, two points on each axis."""
    if not target:
        return values[()]
    low, high = sorted({point[0] for point in values})
    at_low, at_high = (
        extend({point[1:]: v for point, v in values.items() if point[0] == end}, target[1:])
        for end in (low, high)
    )
    return at_low + (at_high - at_low) * (target[0] - low) / (high - low)
