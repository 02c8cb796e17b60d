"""Time of a training step: products, attention, memory traffic, communication, bubble.

Every term is an amount of work divided by a speed: the data sheet's value times a measured share.
The terms are added. Overlap is part of the measured shares, except for `parallel.tp_comm_overlap`:
the time of a transfer is then reduced by the time of the products that run during it. Of the copies
of an offloaded teacher, the time that is longer than the forward passes counts. Products in FP8
count as fewer operations, in proportion to their speed (`planning.fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from dms_train.planning import activations, fp8
from dms_train.planning.activations import Microbatch
from dms_train.planning.flops import mean_keys, trained_products
from dms_train.planning.gpus import Calibration, Gpu
from dms_train.planning.parameters import layer_products, mlp_products
from dms_train.planning.pipeline import bubble
from dms_train.planning.pipeline_stage import PipelineStage
from dms_train.planning.trained import adapters, attention_weights

_GPUS_PER_NODE = 8
_TERA, _GIGA = 1e12, 1e9
_FP32 = 4
_ATTENTION_BACKWARD = 2.5  # in forward passes of the attention
# Bytes a parameter that the update reads and writes: gradient, both moments, master weights.
_UPDATE_BYTES = 28
# Further bytes where both moments are converted from bf16 to fp32 and back.
_CONVERSION_BYTES = 24
# Bandwidth of the memory of a host for updates with `optim.offload`, which its processes share.
# Fitted to the step of the 8B model in docs/guides/planning.md; hosts differ.
_HOST_MEMORY_GBS = 40


class Overlap(NamedTuple):
    """Transfers of a step, and products that run during them.

    Attributes:
        link_bytes: Bytes sent to GPUs of the same node.
        matmul_flops: Operations of the products.
    """

    link_bytes: float
    matmul_flops: float


class Offload(NamedTuple):
    """Copies of the teacher's layers in a step, and the forward passes that run during them.

    Attributes:
        host_bytes: Bytes copied from host memory.
        matmul_flops: Operations of matrix products of the layers of student and teacher.
        attention_flops: Operations of their attention.
    """

    host_bytes: float = 0.0
    matmul_flops: float = 0.0
    attention_flops: float = 0.0


NO_OFFLOAD = Offload()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one process in one step, independent of any speed.

    Attributes:
        matmul_flops: Operations of matrix products; in FP8, those that take as long in bf16.
        attention_flops: Operations of attention.
        traffic_bytes: Bytes that layers keep, once for every pass.
        update_bytes: Bytes that the optimizer reads and writes on the device.
        host_update_bytes: Bytes that the optimizer reads and writes in host memory. Its copies from
            and to the device run during the update and take less time.
        link_bytes: Bytes sent to GPUs of the same node.
        network_bytes: Bytes sent to other nodes.
        overlaps: Parts of `link_bytes`, each with the products that hide it while they run.
        offload: Copies of an offloaded teacher.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0
    update_bytes: float = 0.0
    host_update_bytes: float = 0.0
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    overlaps: tuple[Overlap, ...] = ()
    offload: Offload = NO_OFFLOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by kind, on the busiest pipeline stage.

    Attributes:
        matmul: Products of layers and head.
        attention: Forward, backward and recomputed attention.
        traffic: Norms, activations and other work that memory limits.
        communication: Of all parallel dimensions, and of an offloaded teacher.
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
    processes = min(_GPUS_PER_NODE, stage.microbatch.tp * stage.copies * stage.pp)
    peak = gpu.tflops * _TERA
    compute = {
        "matmul": work.matmul_flops / (peak * c.matmul_efficiency),
        "attention": work.attention_flops / (peak * c.attention_efficiency),
        "traffic": work.traffic_bytes * c.traffic_factor / (gpu.memory_tbs * _TERA),
    }
    link = work.link_bytes / (gpu.link_gbs * _GIGA)
    network = work.network_bytes / (gpu.network_gbs * _GIGA)
    hidden = sum(
        min(
            part.link_bytes / (gpu.link_gbs * _GIGA * c.link_efficiency),
            part.matmul_flops / (peak * c.matmul_efficiency),
        )
        for part in work.overlaps
    )
    return StepTime(
        **compute,
        communication=(link + network) / c.link_efficiency - hidden + _exposed(work, gpu, c),
        update=work.update_bytes / (gpu.memory_tbs * _TERA)
        + work.host_update_bytes * processes / (_HOST_MEMORY_GBS * _GIGA),
        bubble=sum(compute.values()) * bubble(stage.pp, stage.vp, stage.microbatches),
    )


def _exposed(work: Work, gpu: Gpu, c: Calibration) -> float:
    """Return the seconds of copies from the host that the forward passes do not hide."""
    matmul = work.offload.matmul_flops / c.matmul_efficiency
    attention = work.offload.attention_flops / c.attention_efficiency
    copies = work.offload.host_bytes / (gpu.host_gbs * _GIGA)
    return max(0.0, copies - (matmul + attention) / (gpu.tflops * _TERA))


def work_of(stage: PipelineStage) -> Work:
    """Count the work of a process of a pipeline stage in one step."""
    m, a, count = stage.microbatch, stage.microbatch.architecture, stage.microbatches
    layers = stage.layers * stage.vp
    forwards = _forwards(m)
    head = 2 * activations.padded_vocab(a) * a.hidden_size / m.tp * stage.is_last
    products = 2 * layers * layer_products(a) / m.tp
    # forward passes, gradients of inputs, and of weights where they train
    matmul = products * (forwards + 1) + 2 * trained_products(a, m.trainable, layers) / m.tp
    matmul += 2 * layers * mlp_products(a) / m.tp * m.parallel.recomputes("mlp")
    saved = _fp8_saved(m)
    matmul -= layers * (saved.mlp * _mlp_passes(m) + saved.output * _attention_passes(m))
    matmul += 2 * stage.adapters * (forwards - m.distills + 2)
    matmul = m.tokens * (matmul + head * (2 + m.trains_all + m.distills))
    attention = layers * 4 * a.num_attention_heads / m.tp * a.kv_channels
    attention *= m.tokens * mean_keys(a, m.length)
    passes = forwards + m.parallel.recomputes("core_attn") + _ATTENTION_BACKWARD
    links, network = _communication(stage)
    return Work(
        matmul_flops=count * matmul,
        attention_flops=count * attention * passes,
        traffic_bytes=count * _traffic(stage),
        update_bytes=_device_update(stage) + stage.trained * 2 * 4,
        host_update_bytes=stage.updated * _UPDATE_BYTES * stage.optimizer_on_host,
        link_bytes=links,
        network_bytes=network,
        overlaps=_overlaps(stage),
        offload=Offload(
            count * stage.host_bytes,
            count * 2 * m.tokens * (products - layers * (saved.mlp + saved.output)),
            count * 2 * attention,
        ),
    )


def _traffic(stage: PipelineStage) -> int:
    """Return the bytes that the layers of a process keep of a microbatch, once for every pass."""
    # `fp8.SPEEDUP` includes the casts
    parallel = replace(stage.microbatch.parallel, fp8=False)
    m, layers = replace(stage.microbatch, parallel=parallel), stage.layers * stage.vp
    kept = layers * activations.layer(m, None) + activations.head_kept(m) * stage.is_last
    repeated = layers * activations.mlp_kept(m) * m.parallel.recomputes("mlp")
    return kept * (_forwards(m) + 1) + repeated


class _Saved(NamedTuple):
    """Operations of a token and layer whose time FP8 saves, in one pass."""

    mlp: float
    output: float


def _fp8_saved(m: Microbatch) -> _Saved:
    a = m.architecture
    share = (1 - 1 / fp8.SPEEDUP) * m.parallel.fp8 * 2 / m.tp
    return _Saved(share * fp8.mlp_weights(a), share * fp8.mean_output_weights(a))


def _mlp_passes(m: Microbatch) -> int:
    """Count how often a step multiplies with the weights of an MLP."""
    return _forwards(m) + 1 + m.trains_all + m.parallel.recomputes("mlp")


def _attention_passes(m: Microbatch) -> int:
    """Count how often a step multiplies with the weights of attention."""
    return _forwards(m) + 1 + (m.trainable.weights in ("all", "attention"))


def _device_update(stage: PipelineStage) -> int:
    """Count the bytes that the optimizer reads and writes on the device."""
    if stage.optimizer_on_host:
        return 0
    return stage.updated * (_UPDATE_BYTES + _CONVERSION_BYTES * (stage.moment_width < _FP32))


def _communication(stage: PipelineStage) -> tuple[float, float]:
    """Return the bytes that a process sends in a step, to its node and to other nodes."""
    sent, tp = sent_bytes(stage), stage.microbatch.tp
    world_size = tp * stage.copies * stage.pp
    near, far = 0.0, 0.0
    # a group lies within a node if all ranks up to its last one do
    for size, ranks in (
        (sent.tensor, tp),
        (sent.context, tp * stage.microbatch.cp),
        (sent.expert, tp * stage.microbatch.ep),
        (sent.data, tp * stage.copies),
        (sent.pipeline, world_size),
        (sent.embedding, world_size),
    ):
        if ranks > _GPUS_PER_NODE:
            far += size
        else:
            near += size
    return near, far


class SentBytes(NamedTuple):
    """Bytes that a process sends in a step, by the kind of group.

    Attributes:
        tensor: Around the products of layers, embedding and head, without those of experts.
        context: Positions of heads, around attention.
        expert: Hidden states and router probabilities, among the ranks that share experts.
        data: Gradients in fp32 and updated weights.
        pipeline: Stage tensors and their gradients.
        embedding: Gradient in fp32 of tied weights, which the first and last stage add up.
    """

    tensor: float
    context: float
    expert: float
    data: float
    pipeline: float
    embedding: float


def sent_bytes(stage: PipelineStage) -> SentBytes:
    """Count what the collectives of a step send; `dms-plan --trace` lists them one by one."""
    m, layers = stage.microbatch, stage.layers * stage.vp
    parts = layers * (_layer_parts(m) + _adapter_parts(m))
    parts += (stage.rank == 0) * _embedding_parts(m) + stage.is_last * _head_parts(m)
    chunks = 2 * stage.vp - (stage.rank == 0) - stage.is_last
    experts = stage.trained_experts
    trained = _ring(stage.trained - experts, stage.copies) + _ring(experts, stage.expert_copies)
    return SentBytes(
        tensor=stage.microbatches * _ring(parts * m.gathered, m.tp),
        context=stage.microbatches * _ring(_exchanged_bytes(stage), m.cp),
        expert=stage.microbatches * _ring(layers * _routed_bytes(m), m.tp * m.ep),
        data=trained * (_FP32 + m.width),
        pipeline=stage.microbatches * chunks * m.stage_tensor if stage.pp > 1 else 0.0,
        # an all-reduce of two ranks sends the tensor once
        embedding=float(_FP32) * stage.shared_table * m.trains_all,
    )


def _ring(size: float, ranks: int) -> float:
    """Return the part of `size` that does not belong to a rank itself."""
    return size * (ranks - 1) / ranks


def _forwards(m: Microbatch) -> int:
    return 1 + (m.parallel.recompute_granularity == "full") + m.distills


def _layer_parts(m: Microbatch) -> int:
    """Count the gathers and scatters of a layer; an all-reduce is one of each."""
    return _attention_parts(m) + _mlp_parts(m)


def _attention_parts(m: Microbatch) -> int:
    """Count those of attention, which is between a gather and a scatter."""
    # with sequence parallelism the input of a column-parallel product is gathered again for its
    # weights' gradient
    again = m.parallel.sequence_parallel and m.trainable.weights in ("all", "attention")
    return 2 * (_forwards(m) + 1) + again


def _mlp_parts(m: Microbatch) -> int:
    """Count those of the MLP or of a shared expert; `_routed_bytes` counts the other experts."""
    experts = m.architecture.experts
    if experts is not None and not experts.shared_ffn_hidden_size:
        return 0
    again = m.parallel.sequence_parallel and m.trainable.weights == "all"
    repeats = experts is None and m.parallel.recomputes("mlp")
    return 2 * (_forwards(m) + 1 + repeats) + again


def _overlaps(stage: PipelineStage) -> tuple[Overlap, ...]:
    """Return the transfers of attention and of MLPs that `tp_comm_overlap` hides.

    Of the t parts of a product, one runs before the first or after the last transfer.
    """
    m, a = stage.microbatch, stage.microbatch.architecture
    if not m.parallel.tp_comm_overlap or m.tp > _GPUS_PER_NODE:
        return ()
    layers = stage.layers * stage.vp * stage.microbatches
    blocks = (
        (_attention_parts(m), _attention_passes(m) * attention_weights(a)),
        (_mlp_parts(m), _mlp_passes(m) * mlp_products(a)),
    )
    return tuple(
        Overlap(
            layers * _ring(parts * m.gathered, m.tp),
            layers * _ring(2 * m.tokens * products / m.tp, m.tp),
        )
        for parts, products in blocks
    )


def _exchanged_bytes(stage: PipelineStage) -> int:
    """Count the bytes that a rank exchanges: the projection of each layer and its output."""
    m, a = stage.microbatch, stage.microbatch.architecture
    attention = (2 + a.described.output_gate) * m.query + 2 * m.key
    sizes, linear = a.linear, 0
    if sizes is not None:
        rows = sizes.key_heads * sum(sizes.group_rows) + sizes.values
        linear = m.tokens * rows // m.tp * m.width
    layers = stage.attention_layers * attention + sum(stage.linear_layers) * linear
    return (_forwards(m) + 1) * layers


def _routed_bytes(m: Microbatch) -> int:
    """Count the bytes of the tensors that a layer's experts gather and scatter in one microbatch.

    Every rank that shares the experts gathers the hidden states of all tokens, and scatters the
    sums of its experts' outputs.
    """
    experts = m.architecture.experts
    if experts is None:
        return 0
    # router probabilities and outputs are in float32
    hidden = m.architecture.hidden_size * (m.width + _FP32)
    passes = (_forwards(m) + 1) * (hidden + experts.count * _FP32)
    choices = _forwards(m) * experts.count  # one byte each, without a gradient
    return m.tokens * m.ep * (passes + choices)


def _adapter_parts(m: Microbatch) -> float:
    """Return what `_layer_parts` counts, for the narrow products of adapters."""
    output = m.trainable.lora.rank * ("o" in m.trainable.targets)
    narrow = adapters(m.architecture, m.trainable, m.method).inner + output
    return (_forwards(m) - m.distills + 1) * narrow / m.architecture.hidden_size


def _embedding_parts(m: Microbatch) -> int:
    passes = 1 + m.distills
    return passes + 1 if m.parallel.sequence_parallel else 2 * passes


def _head_parts(m: Microbatch) -> int:
    return 2 + m.distills if m.parallel.sequence_parallel else 2
