"""One pass of micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.context import sequence_shards
from dms_train.mcore.schedule.graph import PassGraph
from dms_train.mcore.schedule.stage_tensor import stage_seq_length
from dms_train.mcore.schedule.step_statistics import DeviceTotals, StepStatistics
from dms_train.method.base import MethodOptions
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import MethodLayer
from dms_train.method.noise import sample_keys


class PassContext(NamedTuple):
    """Inputs of a pass besides the model and the batches.

    Attributes:
        method: Method of the model.
        options: Constants of the method and its training.
        statistics: Slots of the measurements of a step.
        step: Global optimizer step, part of the noise key; a number or int64 [].
        target: alpha*, the share that must be evicted; a number or float64 [].
        architecture: Architecture of the model.
        view: This rank's position in the layout.
        seed: Seed of the run.
        token_scale: Micro-batches over all data ranks / loss tokens of the step, float64 [].
        on_microbatch: Called before every micro-batch.
        share: Divides a micro-batch's loss. Megatron's schedule divides by the number of
            micro-batches that it is called with.
        graph: Replays the passes of a micro-batch; None to run them eagerly.
    """

    method: MethodLayer
    options: MethodOptions
    statistics: StepStatistics
    step: int | Tensor
    target: float | Tensor
    architecture: Architecture
    view: ParallelView
    seed: int
    token_scale: Tensor
    on_microbatch: Callable[[], None]
    share: int = 1
    graph: PassGraph | None = None


def to_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Copy batches to the device that trains, without waiting for a GPU."""
    if device.type != "cuda":
        return batches

    def moved(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return [batch.map(moved) for batch in batches]


def token_scale(batches: list[Batch], view: ParallelView) -> Tensor:
    """Divide the number of micro-batches of a global batch by its number of loss positions."""
    count = torch.stack([batch.loss_mask.sum() for batch in batches]).sum().double()
    dist.all_reduce(count, group=view.dp_group)
    return len(batches) * view.dp_size / count.clamp(min=1.0)


# Terms of the token loss [s, b], and eviction statistics [b, EVICTION_STATS].
_Output = tuple[tuple[Tensor, ...], Tensor]


def _loss_function(
    context: PassContext, batch: Batch
) -> Callable[[_Output], tuple[Tensor, dict[str, Tensor]]]:
    a = context.architecture
    per_sample = len(a.method_layers) * a.num_query_groups
    loss_mask, packed = context.view.own_positions(batch.loss_mask), batch.documents
    decisions = per_sample * (batch.tokens.shape[1] if packed is None else packed.tokens)

    def mean(per_token: Tensor) -> Tensor:
        return (per_token.float() * loss_mask.t()).sum() * context.token_scale

    def loss(output: _Output) -> tuple[Tensor, dict[str, Tensor]]:
        terms = [mean(per_token) for per_token in output[0]]
        token_loss = functools.reduce(torch.add, terms)
        eviction_stats = EvictionStats.of(output[1])
        aux_loss = context.method.loss(eviction_stats, decisions, context.target, context.options)
        counted = EvictionStats.of(output[1].detach().double())
        # Separate tensors, because the schedule divides the returned loss in place.
        report = {
            name: term.detach().double()
            for name, term in zip(context.statistics.terms, terms, strict=True)
        }
        report |= {
            "aux_loss": aux_loss.detach().double(),
            "alpha": (counted.alpha / decisions).sum(),
            "live": counted.live.sum() / per_sample,
            "reads": counted.reads.sum() / per_sample,
        }
        packed = context.statistics.pack(report)
        return (token_loss + aux_loss) / context.share, {"report": packed}

    return loss


def _forward_step(context: PassContext) -> Callable[..., Any]:
    def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        context.on_microbatch()
        keys = sample_keys(context.seed, context.step, batch.samples)
        tokens, labels = (context.view.own_positions(x) for x in (batch.tokens, batch.labels))
        stored = batch.teacher and batch.teacher.map(context.view.own_positions)
        output = model(tokens, labels, keys, batch.documents, stored)
        return output, _loss_function(context, batch)

    return forward_step


def run_schedule(
    chunks: list[Any],
    batches: list[Batch],
    forward_step: Callable[..., Any],
    config: Any,
    *,
    has_teacher: bool,
    forward_only: bool,
) -> list[Any]:
    """Call Megatron's schedule on micro-batches of one shape; return the loss reports, if any."""
    size, length = batches[0].tokens.shape
    shards = sequence_shards(config)
    interleaved = len(chunks) > 1
    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if interleaved else iterators[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(batches),
        seq_length=stage_seq_length(length, has_teacher=has_teacher, sequence_shards=shards),
        micro_batch_size=size,
        forward_only=forward_only,
    )


def _nothing() -> None:
    pass


def run_pass(
    chunks: list[Any],
    batches: list[Batch],
    context: PassContext,
    config: Any,
    *,
    has_teacher: bool,
    forward_only: bool,
) -> DeviceTotals:
    """Run the forward (and backward) passes of this rank's micro-batches.

    Returns:
        Statistics over all ranks, which the host need not wait for yet.
    """

    def passes(batches: list[Batch], context: PassContext) -> list[Any]:
        return run_schedule(
            chunks,
            batches,
            _forward_step(context),
            config,
            has_teacher=has_teacher,
            forward_only=forward_only,
        )

    def one(batch: Batch, scale: Tensor) -> Any:
        alone = context._replace(token_scale=scale, share=len(batches), on_microbatch=_nothing)
        return passes([batch], alone)[0]

    graph = context.graph
    if graph is None:
        reports = passes(batches, context)
    else:
        reports = []
        for batch in batches:
            context.on_microbatch()  # a replay calls nothing on the host
            reports.append(graph.run(one, batch, context.token_scale))
    if not forward_only:
        finalize_model_grads(chunks)
    return context.statistics.reduce([r["report"] for r in reports], batches, context.view)
