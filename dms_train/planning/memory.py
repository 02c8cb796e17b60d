"""Memory of every pipeline stage of a run by kind, before anything is allocated.

Every process holds fp32 gradients and its data-parallel share of the optimizer state, as in
`mcore`. A frozen teacher stands next to the student when distilling. The module `activations`
counts the bytes of the microbatches in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import NamedTuple

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import MOMENTS_PIECE, OFFLOAD_SLOTS
from dms_train.planning import activations
from dms_train.planning.gpus import Calibration
from dms_train.planning.pipeline import passes
from dms_train.planning.pipeline_stage import ADAM_MOMENTS, FP32, PipelineStage, stages_of

# Beyond this many rounds of the pipeline, further microbatches repeat the same moments.
_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one process at its fullest moment.

    Attributes:
        weights: Weights of the student.
        gradients: Gradient sums of the weights that train, in fp32.
        optimizer: This process's share of Adam's moments and, with bf16 weights, fp32 weights,
            unless they are in host memory.
        teacher: Weights of the frozen original that the student does not share and that do not lie
            in host memory, or the stored distributions of a step.
        activations: Kept for the backward passes of the microbatches in flight.
        logits: Kept for the backward pass of the last stage's head.
        workspace: The largest set of short-lived tensors, and communication buffers.
    """

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    activations: int
    logits: int
    workspace: int

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.teacher

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.fixed + self.activations + self.logits + self.workspace

    def allocated(self, c: Calibration) -> float:
        """Return the peak of torch's allocator, with the measured corrections."""
        return self.fixed + c.activation_factor * (self.total - self.fixed) + c.constant_bytes

    def needed(self, c: Calibration, world_size: int) -> float:
        """Return the memory a GPU must have, including fragmentation and CUDA itself."""
        outside = c.outside_bytes + (c.nccl_bytes if world_size > 1 else 0)
        return self.allocated(c) * c.reserved_share + outside

    def kinds(self) -> dict[str, int]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _Moment(NamedTuple):
    """Bytes that vary during a step."""

    activations: int = 0
    logits: int = 0
    workspace: int = 0


def estimate(config: RunConfig, architecture: Architecture, world_size: int) -> MemoryEstimate:
    """Estimate the memory of the fullest process of a configuration that passed `check`."""
    return max(estimate_stages(config, architecture, world_size), key=lambda memory: memory.total)


def estimate_stages(
    config: RunConfig, architecture: Architecture, world_size: int
) -> list[MemoryEstimate]:
    """Estimate the memory of one process of every pipeline stage."""
    return [of_stage(stage) for stage in stages_of(config, architecture, world_size)]


def of_stage(stage: PipelineStage) -> MemoryEstimate:
    """Estimate the memory of a process of one pipeline stage."""
    if not stage.trains:
        return _of_pass(stage)
    m = stage.microbatch
    moment = max((*_moments(stage), _update(stage), _start(stage)), key=sum)
    # megatron's buffer for gathers, or the slots of `tp_comm_overlap`
    buffer = m.gathered if m.parallel.sequence_parallel else 0
    return MemoryEstimate(
        weights=(stage.parameters + stage.adapters) * m.width,
        gradients=stage.trained * FP32,
        optimizer=stage.optimizer_bytes,
        teacher=stage.unshared * m.width + stage.stored * stage.is_last,
        activations=moment.activations,
        logits=moment.logits,
        workspace=moment.workspace + buffer,
    )


def _of_pass(stage: PipelineStage) -> MemoryEstimate:
    """Estimate the memory of a pass that keeps nothing for a backward pass."""
    m = stage.microbatch
    (moment,) = _forward(stage, 0, has_head=False)
    head = activations.head_workspace(m) + m.gathered if stage.is_last else 0
    return MemoryEstimate(
        weights=(stage.parameters + stage.adapters) * m.width,
        gradients=0,
        optimizer=0,
        teacher=0,
        activations=0,
        logits=0,
        workspace=max(moment.workspace, head + m.residual),
    )


def _start(stage: PipelineStage) -> _Moment:
    """Return the bytes of an offloaded teacher before it moves, when Adam has no moments yet."""
    later = min(stage.updated * FP32 * ADAM_MOMENTS, stage.optimizer_bytes)
    return _Moment(workspace=max(0, stage.host_bytes - later))


def _update(stage: PipelineStage) -> _Moment:
    """Return the bytes of the optimizer's step on the device.

    AdamW, unless fused, copies its share once. FusedAdam copies the bf16 moments of a piece in
    fp32.
    """
    if stage.optimizer_on_host:
        return _Moment()
    if stage.moment_width < FP32:
        piece = min(stage.updated, max(MOMENTS_PIECE, stage.largest_parameter))
        return _Moment(workspace=piece * FP32 * ADAM_MOMENTS)
    fused = stage.microbatch.fused
    return _Moment(workspace=0 if fused else stage.updated * FP32)


def _moments(stage: PipelineStage) -> list[_Moment]:
    """Return the fullest moments of each kind of pass."""
    m, last_chunk = stage.microbatch, stage.vp - 1
    kept = [
        activations.chunk(
            m,
            stage.layers,
            linear=stage.linear_layers[chunk],
            first=stage.rank == 0 and chunk == 0,
            last=stage.is_last and chunk == last_chunk,
        )
        for chunk in range(stage.vp)
    ]
    rounds = min(stage.microbatches, _ROUNDS * stage.pp)
    held = 0
    fullest: Counter[tuple[bool, bool]] = Counter()
    for forward, chunk in passes(stage.rank, stage.pp, stage.vp, rounds):
        has_head = stage.is_last and chunk == last_chunk
        held += kept[chunk] * forward
        fullest[forward, has_head] = max(fullest[forward, has_head], held)
        held -= kept[chunk] * (not forward)
    return [
        moment
        for (forward, has_head), held in fullest.items()
        for moment in (_forward if forward else _backward)(stage, held, has_head)
    ]


def _in_transit(stage: PipelineStage) -> int:
    """Return the bytes of stage tensors and gradients that are being sent and received."""
    if stage.pp == 1:
        return 0
    tensors = (stage.rank > 0) + (not stage.is_last) if stage.vp == 1 else 4
    return tensors * stage.microbatch.stage_tensor


def _forward(stage: PipelineStage, held: int, has_head: bool) -> list[_Moment]:
    m, transit = stage.microbatch, _in_transit(stage)
    # the student's output is held until the teacher's exists; on the last stage also the norm's
    output = (2 if has_head else 1) * m.residual
    slots = OFFLOAD_SLOTS * stage.host_bytes // (stage.layers * stage.vp)
    moments = [_Moment(held, 0, activations.forward_workspace(m) + output + transit + slots)]
    if has_head:
        work = activations.head_workspace(m) + transit
        moments.append(_Moment(held, activations.head_kept(m), work))
    return moments


def _backward(stage: PipelineStage, held: int, has_head: bool) -> list[_Moment]:
    m, transit = stage.microbatch, _in_transit(stage)
    tied = stage.pp == 1 and m.architecture.tie_word_embeddings
    # with tied weights the projection's gradient is held until the embedding's exists
    waiting = stage.largest_gradient if tied else 0
    moments = [_Moment(held, 0, activations.backward_workspace(m) + waiting + transit)]
    if has_head:
        work = stage.largest_gradient + 3 * m.gathered + transit
        moments.append(_Moment(held, activations.head_kept(m), work))
    return moments
