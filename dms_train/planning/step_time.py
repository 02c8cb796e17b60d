"""Time of a training step: products, attention, memory traffic, communication, bubble.

Every term is an amount of work divided by a speed: the data sheet's value times a measured share.
The terms are added. Overlap is part of the measured shares.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dms_train.planning import activations
from dms_train.planning.gpus import Calibration, Gpu
from dms_train.planning.memory import PipelineStage, layer_products
from dms_train.planning.pipeline import bubble

_GPUS_PER_NODE = 8
_TERA, _GIGA = 1e12, 1e9
_ATTENTION_BACKWARD = 2.5  # in forward passes of the attention
# Bytes a parameter that the update reads and writes: gradient, both moments, master weights.
_UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one process in one step, independent of any speed.

    Attributes:
        matmul_flops: Operations of matrix products.
        attention_flops: Operations of attention.
        traffic_bytes: Bytes that layers keep, once for every pass.
        update_bytes: Bytes that the optimizer reads and writes.
        link_bytes: Bytes sent to GPUs of the same node.
        network_bytes: Bytes sent to other nodes.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0
    update_bytes: float = 0.0
    link_bytes: float = 0.0
    network_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by kind, on the busiest pipeline stage.

    Attributes:
        matmul: Products of layers and head.
        attention: Forward, backward and recomputed attention.
        traffic: Norms, activations and other work that memory limits.
        communication: Tensor-parallel, pipeline and data-parallel.
        update: The optimizer.
        bubble: Waiting for the other stages of the pipeline.
    """

    matmul: float
    attention: float
    traffic: float
    communication: float
    update: float
    bubble: float

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, float]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def step_time(stages: list[PipelineStage], gpu: Gpu, c: Calibration) -> StepTime:
    """Estimate the time of a step.

    Args:
        stages: One for each pipeline stage.
        gpu: Model of the GPUs.
        c: Measured shares of these speeds.
    """
    return max((_timed(stage, gpu, c) for stage in stages), key=lambda time: time.total)


def _timed(stage: PipelineStage, gpu: Gpu, c: Calibration) -> StepTime:
    work = work_of(stage)
    peak = gpu.tflops * _TERA
    compute = {
        "matmul": work.matmul_flops / (peak * c.matmul_efficiency),
        "attention": work.attention_flops / (peak * c.attention_efficiency),
        "traffic": work.traffic_bytes * c.traffic_factor / (gpu.memory_tbs * _TERA),
    }
    link = work.link_bytes / (gpu.link_gbs * _GIGA)
    network = work.network_bytes / (gpu.network_gbs * _GIGA)
    return StepTime(
        **compute,
        communication=(link + network) / c.link_efficiency,
        update=work.update_bytes / (gpu.memory_tbs * _TERA),
        bubble=sum(compute.values()) * bubble(stage.pp, stage.vp, stage.microbatches),
    )


def work_of(stage: PipelineStage) -> Work:
    """Count the work of a process of a pipeline stage in one step."""
    m, a, count = stage.microbatch, stage.microbatch.architecture, stage.microbatches
    recompute = m.parallel.recompute_granularity
    layers = stage.layers * stage.vp
    forwards = 1 + (recompute == "full") + m.distills
    head = 2 * activations.padded_vocab(a) * a.hidden_size / m.tp * stage.is_last
    products = 2 * layers * layer_products(a) / m.tp
    matmul = m.tokens * (products * (forwards + 2) + head * (3 + m.distills))
    attention = layers * 4 * a.num_attention_heads / m.tp * a.kv_channels
    attention *= m.tokens * (m.length + 1) / 2
    passes = forwards + (recompute == "selective") + _ATTENTION_BACKWARD
    kept = layers * activations.layer(m, None) + activations.head_kept(m) * stage.is_last
    links, network = _communication(stage)
    return Work(
        matmul_flops=count * matmul,
        attention_flops=count * attention * passes,
        traffic_bytes=count * kept * (forwards + 1),
        update_bytes=stage.parameters * (_UPDATE_BYTES / stage.copies + 2 * 4),
        link_bytes=links,
        network_bytes=network,
    )


def _communication(stage: PipelineStage) -> tuple[float, float]:
    """Return the bytes that a process sends in a step, to its node and to other nodes."""
    m = stage.microbatch
    tp, copies = m.tp, stage.copies
    forwards = 1 + (m.parallel.recompute_granularity == "full") + m.distills
    # two all-reduces, or pairs of gather and scatter, for each layer and direction
    shared = 2 * (forwards + 1) * stage.layers * stage.vp * 2 * m.gathered * (tp - 1) / tp
    if m.parallel.sequence_parallel:
        # inputs of both column-parallel products are gathered again for their weights' gradients
        shared += 2 * stage.layers * stage.vp * m.gathered * (tp - 1) / tp
    within = stage.microbatches * shared
    pipeline = 2 * stage.microbatches * stage.vp * m.stage_tensor if stage.pp > 1 else 0
    reduced = stage.parameters * (4 + m.width) * (copies - 1) / copies
    far = 0.0
    if tp > _GPUS_PER_NODE:
        within, far = 0.0, far + within
    if tp * copies > _GPUS_PER_NODE:
        far += reduced
    else:
        within += reduced
    if tp * copies * stage.pp > _GPUS_PER_NODE:
        far += pipeline
    else:
        within += pipeline
    return within, far
