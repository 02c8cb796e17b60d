"""Memory of every pipeline stage of a run by kind, before anything is allocated.

Every process holds fp32 gradients and its data-parallel share of the optimizer state, as in
`mcore`. A frozen teacher stands next to the student when distilling. The module `activations`
counts the bytes of the microbatches in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import HOST_PIECE, MOMENTS_PIECE, OFFLOAD_SLOTS
from dms_train.method.token_losses import TOKEN_LOSSES
from dms_train.planning import activations, trained
from dms_train.planning.activations import Microbatch, padded_vocab
from dms_train.planning.gpus import Calibration
from dms_train.planning.pipeline import passes
from dms_train.planning.stored_teacher import step_bytes
from dms_train.planning.trained import attention_weights
from dms_train.training.options import TEACHER_LOGITS

_FP32 = 4
_ADAM_MOMENTS = 2
_HOST_BUFFERS = 2  # of an offloaded optimizer, for gradients and for weights
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


@dataclass(frozen=True, kw_only=True)  # without slots, in which nothing can be cached
class PipelineStage:
    """One pipeline stage of a layout.

    Attributes:
        rank: Number of the stage.
        copies: Number of ranks with the same weights: data-parallel times context-parallel size.
        microbatches: Number of microbatches per data-parallel rank and step.
        stored: Bytes of the stored distributions of a step, which the last stage reads.
        trains: Whether the run takes steps; the stage `teacher_logits` only runs the original.
        optimizer_on_host: `optim.offload`.
        moment_width: Bytes of a number in Adam's moments.
    """

    microbatch: Microbatch
    rank: int
    copies: int
    microbatches: int
    stored: int = 0
    trains: bool = True
    optimizer_on_host: bool = False
    moment_width: int = _FP32

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.microbatch.parallel.pipeline_model_parallel_size

    @property
    def vp(self) -> int:
        """Model chunks of a stage."""
        return self.microbatch.parallel.virtual_pipeline_model_parallel_size or 1

    @cached_property
    def layers(self) -> int:
        """Layers of one model chunk."""
        m = self.microbatch
        return m.parallel.stage_layers(m.architecture.num_layers)[self.rank] // self.vp

    @property
    def method_layers(self) -> int:
        """Layers of all model chunks on which the method acts."""
        method_layers = set(self.microbatch.architecture.method_layers)
        return sum(len(method_layers & set(own)) for own in self.chunks)

    @cached_property
    def chunks(self) -> list[range]:
        """Numbers of the layers of each model chunk."""
        m = self.microbatch
        return m.parallel.stage_chunks(m.architecture.num_layers)[self.rank]

    @cached_property
    def linear_layers(self) -> list[int]:
        """Number of layers with linear attention in each model chunk."""
        layers = self.microbatch.architecture.attention_layers
        return [sum(layers[number].linear for number in own) for own in self.chunks]

    @property
    def attention_layers(self) -> int:
        """Layers of all model chunks that have queries, keys and values."""
        return self.layers * self.vp - sum(self.linear_layers)

    @property
    def is_last(self) -> bool:
        """True if the stage has the output head."""
        return self.rank == self.pp - 1

    @property
    def parameters(self) -> int:
        """Weights on each of the stage's processes."""
        a = self.microbatch.architecture
        tables = int(self.rank == 0)
        if self.is_last and not (self.pp == 1 and a.tie_word_embeddings):
            tables += 1  # a tied one is copied to the last stage
        final_norm = a.hidden_size if self.is_last else 0
        return self.layer_parameters + tables * self._table + final_norm

    @cached_property
    def layer_parameters(self) -> int:
        """Weights of layers on each of the stage's processes."""
        a, tp = self.microbatch.architecture, self.microbatch.tp
        weights = self.attention_layers * (_sharded(a) // tp + _replicated(a))
        linear = _linear_sharded(a) // tp + _linear_replicated(a)
        return weights + sum(self.linear_layers) * linear + self.experts

    @property
    def host_bytes(self) -> int:
        """Bytes of the teacher's layers in the host memory of a process."""
        return self.layer_parameters * self.microbatch.width * self.microbatch.offloads

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory for `host_bytes`: torch rounds each layer up to a power of two."""
        layers = self.layers * self.vp
        each = self.host_bytes // layers
        return layers << (each - 1).bit_length() if each else 0

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this process's share of fp32 weights and Adam's moments on the device."""
        if self.optimizer_on_host:
            return 0
        # fp32 weights are their own master copy
        master = _FP32 if self.microbatch.parallel.params_dtype == "bf16" else 0
        return self.updated * (master + _ADAM_MOMENTS * self.moment_width)

    @property
    def host_optimizer_bytes(self) -> int:
        """Bytes of an offloaded optimizer in the host memory of a process, buffers included."""
        if not self.optimizer_on_host:
            return 0
        buffers = _HOST_BUFFERS * HOST_PIECE * (_FP32 + self.microbatch.width)
        return self.updated * _FP32 * (1 + _ADAM_MOMENTS) + buffers

    @property
    def experts(self) -> int:
        """Weights of experts on each of the stage's processes."""
        m = self.microbatch
        return self.layers * self.vp * (expert_weights(m.architecture) // (m.tp * m.ep))

    @property
    def trained_experts(self) -> int:
        """Weights of experts on each of the stage's processes that train."""
        return self.experts if self.microbatch.trains_all else 0

    @property
    def expert_copies(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.copies // self.microbatch.ep

    @property
    def updated(self) -> int:
        """Weights that this process updates, whose optimizer state it holds."""
        experts = self.trained_experts
        return (self.trained - experts) // self.copies + experts // self.expert_copies

    @property
    def trained(self) -> int:
        """Weights on each of the stage's processes that train, adapters included."""
        m = self.microbatch
        if m.trains_all:
            return self.parameters
        if m.trainable.weights == "attention":
            return self.attention_layers * attention_weights(m.architecture, m.tp)
        return self.adapters

    @property
    def adapters(self) -> int:
        """Parameters of adapters on each of the stage's processes."""
        m = self.microbatch
        count = trained.adapters(m.architecture, m.trainable, m.method)
        return count.parameters(self.attention_layers, self.method_layers, m.tp)

    @property
    def unshared(self) -> int:
        """Weights of the teacher that stay on the device beside those of the student."""
        m = self.microbatch
        if not m.distills:
            return 0
        own = self.parameters - self.layer_parameters * m.offloads
        return self.trained - self.adapters if m.shares else own

    @property
    def shared_table(self) -> int:
        """Weights on this process that a tied model holds on the first and the last stage."""
        is_end = self.rank == 0 or self.is_last
        tied = self.microbatch.architecture.tie_word_embeddings
        return self._table if tied and is_end and self.pp > 1 else 0

    @property
    def _table(self) -> int:
        """Weights of the embedding on each process of its stage."""
        a = self.microbatch.architecture
        return padded_vocab(a) * a.hidden_size // self.microbatch.tp

    @property
    def largest_parameter(self) -> int:
        """Weights of the largest matrix on this process that trains with all weights."""
        a, m = self.microbatch.architecture, self.microbatch
        table = self._table if self.rank == 0 or self.is_last else 0
        return max(table, 2 * a.hidden_size * a.ffn_hidden_size // m.tp)

    @property
    def largest_gradient(self) -> int:
        """Bytes of the vocabulary projection's gradient before it is added up in fp32.

        It is 0 where the products add to the fp32 sums directly.
        """
        a, m = self.microbatch.architecture, self.microbatch
        if m.fused or not self.is_last or not m.trains_all:
            return 0
        return padded_vocab(a) * a.hidden_size // m.tp * m.width


def estimate(config: RunConfig, architecture: Architecture, world_size: int) -> MemoryEstimate:
    """Estimate the memory of the fullest process of a configuration that passed `check`."""
    return max(estimate_stages(config, architecture, world_size), key=lambda memory: memory.total)


def estimate_stages(
    config: RunConfig, architecture: Architecture, world_size: int
) -> list[MemoryEstimate]:
    """Estimate the memory of one process of every pipeline stage."""
    return [of_stage(stage) for stage in stages_of(config, architecture, world_size)]


def stages_of(
    config: RunConfig, architecture: Architecture, world_size: int
) -> list[PipelineStage]:
    """Return the pipeline stages of a configuration that passed `check`, on GPUs."""
    parallel, data = config.parallel, config.data
    copies = world_size // parallel.ranks_per_copy
    stores = TEACHER_LOGITS in config.stage.run
    microbatch = Microbatch(
        architecture=architecture,
        method=config.method,
        parallel=parallel,
        samples=data.micro_batch_size,
        length=data.seq_length,
        distills=runs_teacher(config) or stores,
        kernels=config.kernels,
        fused=config.kernels in ("auto", "triton") and not config.method.decays,
        trainable=config.trainable,
        shares=config.shares_teacher,
        offloads=config.teacher.offload,
    )
    count = data.global_batch_size // (data.micro_batch_size * copies)
    return [
        PipelineStage(
            microbatch=microbatch,
            rank=rank,
            copies=copies * parallel.context_parallel_size,
            microbatches=count,
            stored=step_bytes(config, architecture.vocab_size, count * data.micro_batch_size),
            trains=not stores,
            optimizer_on_host=config.optim.offload and not stores,
            moment_width=2 if config.optim.state_dtype == "bf16" else _FP32,
        )
        for rank in range(parallel.pipeline_model_parallel_size)
    ]


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
        gradients=stage.trained * _FP32,
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
    later = min(stage.updated * _FP32 * _ADAM_MOMENTS, stage.optimizer_bytes)
    return _Moment(workspace=max(0, stage.host_bytes - later))


def _update(stage: PipelineStage) -> _Moment:
    """Return the bytes of the optimizer's step on the device.

    AdamW, unless fused, copies its share once. FusedAdam copies the bf16 moments of a piece in
    fp32.
    """
    if stage.optimizer_on_host:
        return _Moment()
    if stage.moment_width < _FP32:
        piece = min(stage.updated, max(MOMENTS_PIECE, stage.largest_parameter))
        return _Moment(workspace=piece * _FP32 * _ADAM_MOMENTS)
    fused = stage.microbatch.fused
    return _Moment(workspace=0 if fused else stage.updated * _FP32)


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


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the size of one checkpoint: all weights, and fp32 copy and moments of the trained."""
    width = 2 if config.parallel.params_dtype == "bf16" else _FP32
    count = trained.adapters(architecture, config.trainable, config.method)
    attending = len(architecture.cache_layers)
    added = count.parameters(attending, len(architecture.method_layers))
    weights = parameter_count(architecture) + added
    updated = {
        "all": weights,
        "attention": attending * attention_weights(architecture),
    }.get(config.method.train, added)
    return weights * width + updated * _FP32 * (1 + _ADAM_MOMENTS)


def needs_teacher(config: RunConfig) -> bool:
    """Return whether the loss of any stage to run needs the frozen original."""
    blocks = (getattr(config.stage, name) for name in config.stage.run)
    losses = (TOKEN_LOSSES.get(getattr(block, "loss", "")) for block in blocks)
    return any(loss is not None and loss.needs_teacher for loss in losses)


def runs_teacher(config: RunConfig) -> bool:
    """Return whether the frozen original runs beside the student."""
    return needs_teacher(config) and config.teacher.logits is None


def parameter_count(architecture: Architecture) -> int:
    """Count the parameters of the model, a tied output projection once."""
    a = architecture
    embeddings = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
    attending = len(a.cache_layers)
    layers = attending * (_sharded(a) + _replicated(a)) + a.num_layers * expert_weights(a)
    layers += (a.num_layers - attending) * (_linear_sharded(a) + _linear_replicated(a))
    return layers + embeddings + a.hidden_size


def active_parameter_count(architecture: Architecture) -> int:
    """Count the parameters that a token uses: of the experts, those that it passes through."""
    a = architecture
    unused = 0 if a.experts is None else a.experts.count - a.experts.topk
    return parameter_count(a) - a.num_layers * unused * _expert(a)


def layer_products(a: Architecture) -> float:
    """Count the weights of one layer that are multiplied with every token; the mean of all layers.

    Linear attention multiplies states by keys, values and queries in place of attention's products.
    """
    experts = 0 if a.experts is None else a.experts.topk * _expert_products(a)
    common = experts + a.num_experts * a.hidden_size
    if a.linear is None:
        return _matrices(a) + common
    states = 3 * a.linear.values * a.linear.key_channels
    linear = _linear_matrices(a) + states
    share = len(a.cache_layers) / a.num_layers
    return share * _matrices(a) + (1 - share) * linear + common


def expert_weights(a: Architecture) -> int:
    """Count the weights of all experts of one layer."""
    return a.num_experts * _expert(a)


def _expert(a: Architecture) -> int:
    """Count the weights of one expert."""
    biases = 0
    if a.experts is not None and a.described.linear_bias:
        biases = 2 * a.experts.ffn_hidden_size + a.hidden_size
    return _expert_products(a) + biases


def _expert_products(a: Architecture) -> int:
    """Count the weights of one expert that are multiplied with its tokens."""
    return 0 if a.experts is None else 3 * a.hidden_size * a.experts.ffn_hidden_size


def _matrices(a: Architecture) -> int:
    """Count the weights of the projections of attention, and of the MLP where there is one."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    gate = query if a.described.output_gate else 0
    return a.hidden_size * (2 * (query + key) + gate) + mlp_products(a)


def _linear_matrices(a: Architecture) -> int:
    """Count the weights of the projections of linear attention, and of the MLP."""
    if a.linear is None:
        return 0
    rows = a.linear.key_heads * sum(a.linear.group_rows)
    return a.hidden_size * (rows + a.linear.values) + mlp_products(a)


def _linear_sharded(a: Architecture) -> int:
    """Count what `_sharded` counts, for a layer with linear attention."""
    if a.linear is None:
        return 0
    taps = (2 * a.linear.keys + a.linear.values) * a.linear.taps
    return _linear_matrices(a) + taps + 2 * a.linear.value_heads


def _linear_replicated(a: Architecture) -> int:
    """Count what `_replicated` counts, for a layer with linear attention."""
    if a.linear is None:
        return 0
    return _outer_norms(a) + a.linear.value_channels + _gates(a)


def _gates(a: Architecture) -> int:
    """Count the weights of the router, and of the gate of a shared expert."""
    return (a.num_experts + a.described.shares_expert) * a.hidden_size


def _outer_norms(a: Architecture) -> int:
    """Count the weights of the norms around attention and MLP."""
    return 2 * (a.described.sandwich_norms + a.described.input_norms) * a.hidden_size


def mlp_products(a: Architecture) -> int:
    """Count the weights of the MLP of one layer, or of the expert that all tokens share."""
    width = a.ffn_hidden_size if a.experts is None else a.experts.shared_ffn_hidden_size
    return 3 * a.hidden_size * width


def _sharded(a: Architecture) -> int:
    """Count the weights of one layer that tensor parallelism divides, without experts."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    norms = query + key if a.described.joint_qk_norm else 0
    sinks = a.num_attention_heads if a.described.sinks else 0
    return _matrices(a) + norms + sinks + (query + 2 * key if a.add_qkv_bias else 0)


def _replicated(a: Architecture) -> int:
    """Count the weights of one layer that tensor parallelism does not divide, without experts."""
    family = a.described
    per_head = a.qk_layernorm and not family.joint_qk_norm
    norms = _outer_norms(a) + (2 * a.kv_channels if per_head else 0)
    biases = a.hidden_size + a.num_experts if family.linear_bias else 0
    return norms + _gates(a) + biases
