"""One pass of microbatches through megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.hf.architecture import Architecture
from dms_train.mcore.footprint import own_memory
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.schedule.graph import PassGraph
from dms_train.mcore.schedule.stage_tensor import stage_seq_length
from dms_train.method.layer import MethodLayer
from dms_train.method.noise import sample_keys


class PassContext(NamedTuple):
    """Inputs of a pass besides the model and the batches.

    Attributes:
        method: Method of the model.
        step: Global optimizer step, part of the noise key; a number or int64 [].
        target: alpha*, the share that must be evicted; a number or float64 [].
        architecture: Architecture of the model.
        view: This rank's place in the layout.
        seed: Seed of the run.
        token_scale: Microbatches over all data ranks / loss tokens of the step, float64 [].
        on_microbatch: Called before every microbatch.
        share: Divides a microbatch's loss. Megatron's schedule divides by the number of
            microbatches that it is called with.
        graph: Replays the passes of a microbatch; None to run them eagerly.
    """

    method: MethodLayer
    step: int | Tensor
    target: float | Tensor
    architecture: Architecture
    view: ParallelView
    seed: int
    token_scale: Tensor
    on_microbatch: Callable[[], None]
    share: int = 1
    graph: PassGraph | None = None


class PassTotals(NamedTuple):
    """Sums over all samples of a pass, the same on every rank.

    `token_loss` and `aux_loss` are the two terms of the objective; `alpha`, `live` and `reads` are
    per-decision means summed over samples. `positions` leaves the padding of packed samples out.
    `memory_bytes` is that of the fullest process.
    """

    token_loss: float
    aux_loss: float
    alpha: float
    live: float
    reads: float
    samples: float
    positions: float
    memory_bytes: float

    @property
    def loss(self) -> float:
        """The objective."""
        return self.token_loss + self.aux_loss


def to_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    """The same batches where the training computes; on a GPU the host does not wait for it."""
    if device.type != "cuda":
        return batches

    def moved(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return [batch.map(moved) for batch in batches]


def token_scale(batches: list[Batch], view: ParallelView) -> Tensor:
    """Microbatches of the global batch over its loss positions, without waiting for the device."""
    count = torch.stack([batch.loss_mask.sum() for batch in batches]).sum().double()
    dist.all_reduce(count, group=view.dp_group)
    return len(batches) * view.dp_size / count.clamp(min=1.0)


def _loss_function(
    context: PassContext, batch: Batch
) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, dict[str, Tensor]]]:
    a = context.architecture
    per_sample = a.num_layers * a.num_query_groups
    packed = batch.documents
    decisions = per_sample * (batch.tokens.shape[1] if packed is None else packed.tokens)

    def loss(output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        losses, eviction_stats = output
        token_loss = (losses.float() * batch.loss_mask.t()).sum() * context.token_scale
        aux_loss = context.method.loss(eviction_stats, decisions, context.target)
        alpha, live, reads, _ = eviction_stats.detach().double().unbind(1)
        means = ((alpha / decisions).sum(), live.sum() / per_sample, reads.sum() / per_sample)
        # Own tensors: the schedule divides the returned loss in place.
        report = torch.stack([token_loss.detach().double(), aux_loss.detach().double(), *means])
        return (token_loss + aux_loss) / context.share, {"report": report}

    return loss


def _forward_step(context: PassContext) -> Callable[..., Any]:
    def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        context.on_microbatch()
        keys = sample_keys(context.seed, context.step, batch.samples)
        output = model(batch.tokens, batch.labels, keys, batch.documents)
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
    """Call megatron's schedule on microbatches of one shape; the last stage's loss reports."""
    size, length = batches[0].tokens.shape
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
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
) -> Tensor:
    """Forward (and backward) of this rank's microbatches.

    Returns:
        The numbers of `PassTotals` over all ranks, float64 on this rank's device, so that the host
        need not wait for them yet.
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
    return _totals(reports, batches, context.view)


def _totals(reports: list[Any], batches: list[Batch], view: ParallelView) -> Tensor:
    # seven sums, then one place for each rank's memory, so that one collective brings everything
    totals = torch.zeros(7 + view.world_size, dtype=torch.float64, device=view.device)
    if view.reports and reports:
        stacked = torch.stack([r["report"] for r in reports])
        totals[:5] = stacked.sum(0)
        totals[5] = sum(len(batch.samples) for batch in batches)
        totals[6] = sum(batch.positions for batch in batches)
    totals[7 + view.rank] = own_memory(view.device)
    dist.all_reduce(totals)
    microbatches = len(batches) * view.dp_size
    totals[:2] /= microbatches
    totals[7] = totals[7:].max()
    return totals[:8]
