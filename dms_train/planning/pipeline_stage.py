"""Pipeline stages of a layout: the layers, weights and optimizer state of their processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import HOST_PIECE
from dms_train.planning import trained
from dms_train.planning.activations import Microbatch, padded_vocab
from dms_train.planning.parameters import (
    attention_layer_weights,
    expert_weights,
    linear_layer_weights,
)
from dms_train.planning.stored_teacher import step_bytes
from dms_train.planning.trained import attention_weights
from dms_train.training.options import TEACHER_LOGITS

FP32 = 4  # bytes
ADAM_MOMENTS = 2
_HOST_BUFFERS = 2  # of an offloaded optimizer, for gradients and for weights


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
    moment_width: int = FP32

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
        weights = self.attention_layers * attention_layer_weights(a, tp)
        return weights + sum(self.linear_layers) * linear_layer_weights(a, tp) + self.experts

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
        master = FP32 if self.microbatch.parallel.params_dtype == "bf16" else 0
        return self.updated * (master + ADAM_MOMENTS * self.moment_width)

    @property
    def host_optimizer_bytes(self) -> int:
        """Bytes of an offloaded optimizer in the host memory of a process, buffers included."""
        if not self.optimizer_on_host:
            return 0
        buffers = _HOST_BUFFERS * HOST_PIECE * (FP32 + self.microbatch.width)
        return self.updated * FP32 * (1 + ADAM_MOMENTS) + buffers

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
        distills=config.runs_teacher or stores,
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
            moment_width=2 if config.optim.state_dtype == "bf16" else FP32,
        )
        for rank in range(parallel.pipeline_model_parallel_size)
    ]
