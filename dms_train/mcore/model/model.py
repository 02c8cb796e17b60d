"""Model of one pipeline chunk: student and frozen teacher in the same pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.hf.embeddings import embedding_scale
from dms_train.hf.rope import Rope
from dms_train.hf.yarn import yarn_frequencies
from dms_train.mcore import compat
from dms_train.mcore.layers import vocabulary_losses as vocab_losses
from dms_train.mcore.layers.attention import MethodState
from dms_train.mcore.layers.backend import LayerBackend
from dms_train.mcore.layers.context import heads_group, sequence_shards
from dms_train.mcore.layers.layer_spec import block_spec
from dms_train.mcore.model.configuration import padded_vocab_size, rope_arguments
from dms_train.mcore.options import Trainable
from dms_train.mcore.schedule.stage_tensor import StageState, pack, unpack
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.top_logits import TopLogits


class Teacher(Protocol):
    """Frozen original of one pipeline chunk; its functions are those of `DMSModel`."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [b, s]."""
        ...

    def run_layers(
        self,
        hidden: Tensor,
        eviction_stats: Tensor,
        noise_keys: Tensor | None,
        documents: PackedDocuments | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the layers of the chunk, in at most as many units as the student."""
        ...

    def projection(self, hidden: Tensor) -> vocab_losses.Projection:
        """Return the factors of the logits."""
        ...


@contextlib.contextmanager
def _norms_allowed(config: TransformerConfig, a: Architecture) -> Iterator[None]:
    """Let layers have norms of q and k, which newer versions of megatron ask the configuration."""
    before, config.qk_layernorm = config.qk_layernorm, a.qk_layernorm
    try:
        yield
    finally:
        config.qk_layernorm = before


class DMSModel(LanguageModule):
    """Embedding, decoder layers and output layer with student and teacher in one `stage_tensor`.

    Attribute names are those of megatron-core's GPTModel: they are the keys of checkpoints.
    """

    model_type = ModelType.encoder_or_decoder  # the schedules read it

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        method: MethodState,
        layer_backend: LayerBackend,
        trainable: Trainable,
        *,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        self.vp_stage = vp_stage
        self.pre_process = parallel_state.is_pipeline_first_stage(**stage)
        self.post_process = parallel_state.is_pipeline_last_stage(**stage)
        self.share_embeddings_and_output_weights = architecture.tie_word_embeddings
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                padded_vocab_size(architecture),
                architecture.max_position_embeddings,
                position_embedding_type="rope",
                tp_group=self.pg_collection.tp,
            )
        with _norms_allowed(config, architecture):
            self.decoder = TransformerBlock(
                config,
                block_spec(config, method, layer_backend, trainable, vp_stage, architecture),
                pre_process=self.pre_process,
                post_process=self.post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
        if self.post_process:
            self.output_layer = self._output_layer(padded_vocab_size(architecture))
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        self.architecture = architecture
        ropes = [architecture.ropes[layer.layer_number - 1] for layer in self.decoder.layers]
        self._add_ropes(ropes)
        self._describe_attention(ropes)
        self._embedding_scale = embedding_scale(architecture, config.params_dtype)
        self.method = method
        self.records_logits = False
        self.stores: tuple[int, float] | None = None  # k and temperature of `top_logits`
        self._stage_input: Tensor | None = None
        # a list keeps the teacher from being a submodule in DDP, optimizer and checkpoint
        self._teacher: list[Teacher] = []

    def _add_ropes(self, ropes: list[Rope]) -> None:
        """Add the RoPE of the model, and each other one that a layer of this chunk has."""
        a = self.architecture
        whole = Rope(a.rotary_base, a.rope_scaling)
        self.rotary_pos_emb = self._rotary_embedding(a.rotary_channels, whole)
        self._layer_ropes = list(dict.fromkeys(ropes))
        self._rope_numbers = [self._layer_ropes.index(rope) for rope in ropes]
        self._local_ropes = {
            rope: self._rotary_embedding(a.rotary_channels, rope)
            for rope in self._layer_ropes
            if rope.base is not None and rope != whole
        }

    def _describe_attention(self, ropes: list[Rope]) -> None:
        """Give the attention of each layer its window, and its softmax scale."""
        for layer, rope in zip(self.decoder.layers, ropes, strict=True):
            if self.architecture.attention_layers[layer.layer_number - 1].linear:
                continue
            core = layer.self_attention.core_attention
            window = self.architecture.attention_layers[layer.layer_number - 1].window
            core.window = None if window is None else window - 1
            # the factor of YaRN on queries and on keys
            core.scale *= rope.attention_factor**2

    def _rotary_embedding(self, channels: int, rope: Rope) -> RotaryEmbedding:
        assert rope.base is not None
        rotary = RotaryEmbedding(
            channels,
            rotary_percent=1.0,
            rotary_base=rope.base,
            cp_group=self.pg_collection.cp,
            **rope_arguments(rope.scaling),
        )
        if rope.scaling is not None and rope.scaling.rope_type == "yarn":
            rotary.inv_freq = yarn_frequencies(rotary.inv_freq, rope.base, rope.scaling)
        return rotary

    def _output_layer(self, rows: int) -> ColumnParallelLinear:
        """Make the output layer; it has no weight of its own if this chunk's embedding is tied."""
        return ColumnParallelLinear(
            self.config.hidden_size,
            rows,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process
            and self.share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of a checkpoint by key, as megatron-core's GPTModel names them."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # megatron-core's linear layers list an entry without data, which checkpoints do not have
        entries.pop(f"{prefix}output_layer._extra_state", None)
        return entries

    @property
    def teacher(self) -> Teacher | None:
        """The frozen teacher's chunk if the loss of the current plan needs it."""
        wanted = self.method.plan.token_loss.needs_teacher and not self.records_logits
        return self._teacher[0] if self._teacher and wanted else None

    @property
    def has_teacher(self) -> bool:
        """True if a teacher is attached, independent of the plan."""
        return bool(self._teacher)

    def set_teacher(self, teacher: Teacher) -> None:
        """Attach the frozen chunk of the same layout, or this chunk's own frozen weights."""
        self._teacher = [teacher]

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous stage's tensor; the schedules call it."""
        self._stage_input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [b, s] as [s, b, h], or this rank's positions of it."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        embedded: Tensor = self.embedding(tokens, positions)
        return embedded * self._embedding_scale if self._embedding_scale != 1 else embedded

    def run_layers(
        self,
        hidden: Tensor,
        eviction_stats: Tensor,
        noise_keys: Tensor | None,
        documents: PackedDocuments | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run this chunk's layers one by one, or in recomputed units, and then the final norm.

        Yields:
            Hidden states, and the eviction statistics so far, after each of the units.
        """
        config, count = self.config, len(self.decoder.layers)
        ropes = self._ropes(hidden.shape[0] * sequence_shards(config), documents)
        in_units = config.recompute_granularity == "full"
        unit = config.recompute_num_layers if in_units else 1
        for first in range(0, count, unit):
            run = self._layers(first, first + unit, documents)
            arguments = (hidden, eviction_stats, noise_keys, *ropes)
            if in_units and torch.is_grad_enabled():
                hidden, eviction_stats = tensor_parallel.checkpoint(run, False, *arguments)
            else:
                hidden, eviction_stats = run(*arguments)
            if first + unit >= count and self.decoder.final_layernorm is not None:
                hidden = self.decoder.final_layernorm(hidden)
            yield hidden, eviction_stats

    def _run_models(
        self,
        state: StageState,
        teacher: Teacher | None,
        noise_keys: Tensor,
        documents: PackedDocuments | None,
    ) -> StageState:
        """Run the layers of student and teacher in turn.

        While the student's layers run, weights of an offloaded teacher arrive.
        """
        t_units: Iterator[tuple[Tensor, Tensor]] = iter(())
        if teacher is not None and state.teacher is not None:
            nothing = torch.zeros_like(state.eviction_stats)
            t_units = teacher.run_layers(state.teacher, nothing, None, documents)
        units = self.run_layers(state.student, state.eviction_stats, noise_keys, documents)
        fork = self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            for hidden, eviction_stats in units:
                with torch.no_grad():
                    t_hidden, _ = next(t_units, (state.teacher, None))
                state = StageState(hidden, t_hidden, eviction_stats)
        return state

    def _ropes(self, length: int, documents: PackedDocuments | None) -> list[Tensor]:
        """Return the RoPE tables for `length` positions, in the order of `_layer_ropes`."""
        turned = self.rotary_pos_emb.get_emb(length)
        tables = []
        for rope in self._layer_ropes:
            own = turned
            if rope.base is None:
                own = torch.zeros_like(turned)
            elif rope in self._local_ropes:
                own = self._local_ropes[rope].get_emb(length)
            tables.append(self.method.rope(self._of_whole_heads(own), documents))
        return tables

    def _of_whole_heads(self, angles: Tensor) -> Tensor:
        """Pad the angles of the rotated channels with zeros, [s, 1, 1, d]."""
        still = self.architecture.kv_channels - self.architecture.rotary_channels
        if not still:
            return angles
        return F.pad(angles.unflatten(-1, (2, -1)), (0, still // 2)).flatten(-2)

    def _layers(self, first: int, last: int, documents: PackedDocuments | None = None) -> Any:
        def run(
            hidden: Tensor, eviction_stats: Tensor, noise_keys: Tensor | None, *ropes: Tensor
        ) -> tuple[Tensor, Tensor]:
            for layer, rope in zip(
                self.decoder.layers[first:last], self._rope_numbers[first:last], strict=True
            ):
                attention = layer.self_attention
                # the recomputed unit keeps both, so recomputation reads the values of its own
                # micro-batch
                attention.noise_keys, attention.documents = noise_keys, documents
                hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=ropes[rope])
                eviction_stats = eviction_stats + attention.eviction_stats
                attention.eviction_stats = attention.noise_keys = attention.documents = None
            return hidden, eviction_stats

        return run

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute vocabulary-sharded logits [s, b, padded vocabulary / tp]."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        return self.output_layer(hidden, weight=weight)[0]

    def projection(self, hidden: Tensor) -> vocab_losses.Projection:
        """Return the factors of `logits`, for losses that compute logits chunk by chunk."""
        # The output layer itself is not called.
        compat.run_forward_pre_hooks(self.output_layer)
        group, tied = self.pg_collection.tp, self.share_embeddings_and_output_weights
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        accumulates = self.config.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        return vocab_losses.Projection(hidden, weight, accumulates)

    def _input_state(self, tokens: Tensor, teacher: Teacher | None) -> StageState:
        if not self.pre_process:
            assert self._stage_input is not None
            return unpack(self._stage_input, has_teacher=teacher is not None)
        hidden = self.embed(tokens)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # reentrant recomputation of layers after a frozen embedding would drop all gradients
            hidden.requires_grad_()
        with torch.no_grad():
            t_hidden = None if teacher is None else teacher.embed(tokens)
        return StageState(
            hidden, t_hidden, torch.zeros(tokens.shape[0], EVICTION_STATS, device=hidden.device)
        )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        noise_keys: Tensor,
        documents: PackedDocuments | None = None,
        stored: TopLogits | None = None,
    ) -> Tensor | tuple[Tensor | TopLogits | tuple[Tensor, ...], Tensor]:
        """Run one pipeline chunk.

        Args:
            tokens: This rank's positions, int64 [b, s].
            labels: The same for the language-model loss, int64 [b, s].
            noise_keys: int64 [b], one per sample.
            documents: Documents packed into the whole samples, for both models; None if a sample
                is one document.
            stored: Stored distributions of the teacher at this rank's positions, [b, s, k] and
                [b, s]; the last stage needs them if no teacher is attached.

        Returns:
            The stage tensor, or on the last stage (terms of the token loss [s, b], eviction
            statistics [b, EVICTION_STATS] over all layers and heads); logits instead of the terms
            while recording.
        """
        teacher = self.teacher
        state = self._run_models(self._input_state(tokens, teacher), teacher, noise_keys, documents)
        if not self.post_process:
            return pack(state)
        # backward is the identity: every rank of the group computes the same loss from the sum
        eviction_stats = reduce_from_tensor_model_parallel_region(
            state.eviction_stats, group=heads_group(self.pg_collection)
        )
        return self._loss(state.student, state.teacher, labels, stored), eviction_stats

    def _loss(
        self, hidden: Tensor, t_hidden: Tensor | None, labels: Tensor, stored: TopLogits | None
    ) -> Tensor | TopLogits | tuple[Tensor, ...]:
        if self.records_logits:
            return self.logits(hidden)
        if self.stores is not None:
            return self._top_logits(hidden, self.stores)
        teacher = None
        if self.teacher is not None and t_hidden is not None:
            with torch.no_grad():
                teacher = self.teacher.projection(t_hidden)
        losses = vocab_losses.OutputLosses(
            student=self.projection(hidden),
            teacher=teacher,
            labels=labels,
            vocab_size=self.architecture.vocab_size,
            group=self.pg_collection.tp,
            stored=stored,
        )
        return self.method.plan.token_loss.per_token(losses, self.method.loss_options)

    def _top_logits(self, hidden: Tensor, stores: tuple[int, float]) -> TopLogits:
        """Return the most probable tokens of all positions, [s, b, k] and [s, b]."""
        vocab_size, groups = self.architecture.vocab_size, self.pg_collection
        model = self.projection(hidden)
        own = vocab_losses.top_logits(model, *stores, vocab_size, groups.tp)
        return own.map(lambda x: vocab_losses.from_all_ranks(x, groups.cp).flatten(0, 1))
