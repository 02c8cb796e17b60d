"""Self-attention with the decisions of a retrofit method, which it passes to the kernels.

Shape letters: s positions, b samples, n query heads, g KV heads, r query heads per KV head,
d head size; numbers of heads are per tensor-parallel and context-parallel rank. Positions are those
of the whole sequence between the projections (`mcore.layers.context`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from dms_train.kernels.train_attention.interface import DMSAttention
from dms_train.mcore.layers.context import heads_group, to_heads, to_positions
from dms_train.method.base import MethodOptions
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.layer import Decided, Heads, LayerKernels, LayerPass, method_layer
from dms_train.method.noise import LayerNoise
from dms_train.method.plan import StepPlan
from dms_train.method.schedule import evicted_fraction
from dms_train.method.token_losses import PLAIN_LOSS, LossOptions


class MethodState:
    """State that all layers of a model share: constants, the kernel and the current step's plan.

    It holds values of a step only, because with 1F1B and recomputation another micro-batch would
    read the value of an earlier one.

    Args:
        options: Method of the model and its training.
        attend: Attention kernel.
        loss: Parameters of the token losses.
        fused_on: Device of the fused kernels around attention, which need triton; None for plain
            operations.
    """

    def __init__(
        self,
        options: MethodOptions,
        attend: DMSAttention,
        *,
        loss: LossOptions = PLAIN_LOSS,
        fused_on: torch.device | None = None,
    ) -> None:
        self.loss_options = loss
        self.fused = fused_on is not None
        self.set_options(options)
        self.attend = attend
        self.plan = StepPlan()
        self.step: int | Tensor = 0
        self.target: float | Tensor = 0.0
        self.channel_scale: float | Tensor = 1.0
        if fused_on is not None:
            # fixed addresses, from which a CUDA graph reads the values of the current step
            self.step = torch.zeros((), dtype=torch.int64, device=fused_on)
            self.target = torch.zeros((), dtype=torch.float64, device=fused_on)
            self.channel_scale = torch.ones((), device=fused_on)
        self._dense_stats: dict[tuple[int, int, int], Tensor] = {}

    def set_options(self, options: MethodOptions) -> None:
        """Make `options` the method of the next passes."""
        self.options = options
        self.spec = options.spec
        self.layer = method_layer(self.spec, _layer_kernels() if self.fused else None)

    def set_plan(self, plan: StepPlan) -> None:
        """Make `plan` the plan of the next passes."""
        self.plan = plan
        values = {
            "step": plan.step,
            "target": evicted_fraction(plan.target_cr),
            "channel_scale": plan.channel_scale,
        }
        for name, value in values.items():
            if self.fused:
                getattr(self, name).fill_(value)
            else:
                setattr(self, name, value)

    def target_of(self, layer: int) -> float | Tensor:
        """Return alpha* of a layer, given its number."""
        weights = self.plan.layer_weights
        return self.target * weights[layer] if weights else self.target

    @property
    def overall_target(self) -> float | Tensor:
        """alpha* of all layers together; -1, which asks for nothing, if each has its own."""
        return -1.0 if self.plan.layer_weights else self.target

    def computation(self, plan: StepPlan) -> StepPlan:
        """Return the plan without the numbers that passes read from tensors."""
        if not self.fused:
            return plan
        scale = 1.0 if self.layer.scale_on_device else plan.channel_scale
        return replace(plan, step=0, stage_step=0, target_cr=1.0, channel_scale=scale)

    def rope(self, frequencies: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        """Return the RoPE table passed to every layer, from Megatron's frequencies [s, 1, 1, d].

        With packed documents each sample has the rows of its own positions.
        """
        at = None if documents is None else documents.positions.t().contiguous()
        if not self.fused:
            return frequencies if at is None else frequencies[at, 0]
        from dms_train.kernels.layers.triton_rope import rope_table

        table = rope_table(frequencies)
        return table if at is None else table[at]

    def dense_eviction_stats(self, like: Tensor) -> Tensor:
        """Return the first columns of `EvictionStats` where every slot stays, [b, 3].

        `like` is any tensor [s, b, g, ...] of the layer.
        """
        s, b, g = like.shape[:3]
        stats = self._dense_stats.get((s, b, g))
        if stats is None or stats.device != like.device:
            # filled on the device: a tensor of Python numbers would wait for a copy
            values = (0.0, float(s * g), g * (s + 1) / 2)
            stats = torch.stack([torch.full((b,), v, device=like.device) for v in values], 1)
            self._dense_stats[s, b, g] = stats
        return stats


class CoreAttention(MegatronModule):
    """Module around the kernel call, for Megatron's spec and selective recomputation."""

    def __init__(
        self,
        config: Any,
        method: MethodState,
        sinks: bool = False,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.method = method
        self.window: int | None = None  # of the layer, in tokens before the query
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.softmax_offset = self._sinks() if sinks else None

    def _sinks(self) -> torch.nn.Parameter:
        """Allocate the sinks of this tensor-parallel rank's heads, as megatron-core names them."""
        config = self.config
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        device = torch.cuda.current_device()
        sinks = torch.nn.Parameter(torch.zeros(heads, device=device, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        return sinks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_keep: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Map query [s, b, n, d], key, value [s, b, g, d], log_keep [b, g, s] to [s, b, n * d].

        `cu_seqlens` holds the bounds of packed documents in the concatenated samples.
        """
        heads = [t.transpose(0, 1) for t in (query, key, value)]
        if cu_seqlens is not None:  # the kernels take documents of one sample
            heads = [t.reshape(1, -1, *t.shape[2:]) for t in heads]
            if log_keep is not None:
                log_keep = log_keep.transpose(0, 1).flatten(1)[None]
        q, k, v = heads
        window = self.window
        if window is None and not self.method.spec.decays:
            window = self.method.spec.window
        s, b, n, d = query.shape
        sinks = self._own_sinks(n)
        out = self.method.attend(q, k, v, log_keep, window, self.scale, cu_seqlens, sinks)
        return out.view(b, s, n, d).transpose(0, 1).reshape(s, b, -1)

    def _own_sinks(self, heads: int) -> Tensor | None:
        """Return the sinks of the heads of this rank, of which context parallelism has a part."""
        if self.softmax_offset is None:
            return None
        first = parallel_state.get_context_parallel_rank() * heads
        return self.softmax_offset[first : first + heads].float()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of a checkpoint by key; ranks share the sinks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )


class _LayerProjection:
    """`method.layer.Projection` of a layer's hidden states [s, b, h].

    Attributes:
        gate: Output gate [s, b, n, d] before its sigmoid, once the heads exist; None in a family
            without.
    """

    def __init__(
        self, attention: MethodSelfAttention, hidden_states: Tensor, rope: Tensor | None
    ) -> None:
        self.attention, self.hidden_states, self.rope = attention, hidden_states, rope
        self.gate: Tensor | None = None

    @property
    def is_gated(self) -> bool:
        """True if the projection has an output gate."""
        return bool(self.attention.config.attention_output_gate)

    def heads(self) -> Heads:
        """Return the heads before RoPE."""
        query, key, value, *gate = self.attention.get_query_key_value_tensors(
            self.hidden_states, output_gate=self.is_gated
        )
        self.gate = gate[0] if gate else None
        return Heads(query.view(*key.shape[:3], -1, key.shape[3]), key, value)

    def rotated(self, channel: int, *, clear_after_rope: bool) -> tuple[Heads, Tensor]:
        """Rotate with one kernel, which also splits the projection where no norm follows it."""
        from dms_train.kernels.layers import triton_rope
        from dms_train.kernels.layers.types import EvictionChannel

        attention, table = self.attention, self.rope
        assert table is not None
        d = attention.hidden_size_per_attention_head
        scaled = EvictionChannel(channel % d, attention.method.channel_scale, clear_after_rope)
        if self.is_gated or not isinstance(attention.q_layernorm, IdentityOp):
            heads = self.heads()
            query, key, raw = triton_rope.rotate(heads.query, heads.key, table, scaled)
            value = heads.value
        else:
            mixed, _ = attention.linear_qkv(self.hidden_states)
            groups = attention.num_query_groups_per_partition
            mixed = mixed.view(*mixed.shape[:2], groups, -1, d)
            query, key, value, raw = triton_rope.split_and_rotate(mixed, table, scaled)
        return Heads(query.view(*key.shape[:3], -1, d), key, value), raw


class MethodSelfAttention(SelfAttention):
    """Megatron's self-attention with a retrofit method.

    The block sets `noise_keys` and `documents` right before each call and takes `eviction_stats`
    right after it, inside the recomputed unit; they belong to one micro-batch only.
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, method: MethodState, **kwargs: Any
    ):
        super().__init__(config, submodules, *args, **kwargs)
        self.method = method
        context_ranks = self.pg_collection.cp.size()
        self.num_query_groups_per_partition //= context_ranks
        self.num_attention_heads_per_partition //= context_ranks
        if context_ranks > 1:
            # a hook, because Megatron's own function projects and splits the heads in one
            self.linear_qkv.register_forward_hook(self._exchange)
        self.noise_keys: Tensor | None = None
        self.documents: PackedDocuments | None = None
        self.eviction_stats: Tensor | None = None
        self.recorded: list[Tensor] | None = None  # decision logits [s, b, g] while recording
        self.held: Tensor | None = None  # slots at the last token [g], summed while counting

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within hidden_states, this rank's positions [s, b, h]; the mask is causal."""
        projection = _LayerProjection(self, hidden_states, rotary_pos_emb)
        heads, log_keep, stats = self._prepare(projection)
        self.eviction_stats = F.pad(stats, (0, EVICTION_STATS - stats.shape[1]))
        cu_seqlens = None if self.documents is None else self.documents.cu_seqlens
        inputs = heads.query.flatten(2, 3), heads.key, heads.value, log_keep, cu_seqlens
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(self.core_attention, False, *inputs)
        else:
            context = self.core_attention(*inputs)
        if projection.gate is not None:
            context = context * projection.gate.flatten(2).sigmoid()
        return self.linear_proj(to_positions(context, self.pg_collection.cp))

    def _exchange(self, _module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> Any:
        return to_heads(output[0], self.pg_collection.cp), output[1]

    def _prepare(self, projection: _LayerProjection) -> tuple[Heads, Tensor | None, Tensor]:
        """Return rotated heads, log(1 - alpha) by key or None, and eviction statistics."""
        if self.core_attention.window is not None:
            return self._prepare_window(projection)
        layer, step = self.method.layer, self._pass(projection.rope)
        if self.method.fused:
            heads, decided = layer.prepare_fused(projection, step)
        else:
            heads, decided = layer.prepare(projection.heads(), step)
        return heads, *self._account(decided, heads.key)

    def _prepare_window(self, projection: _LayerProjection) -> tuple[Heads, Tensor, Tensor]:
        """Return the same for a layer with a window: every key is evicted when it leaves it.

        The method neither changes the heads nor counts the layer.
        """
        heads = projection.heads()
        query, key = self._rotate(projection.rope, heads.query, heads.key)
        s, b, g = key.shape[:3]
        log_keep = torch.full((b, g, s), -torch.inf, device=key.device)
        return Heads(query, key, heads.value), log_keep, log_keep.new_zeros(b, EVICTION_STATS)

    def _pass(self, rotary_pos_emb: Tensor | None) -> LayerPass:
        """Describe this micro-batch to the method."""
        return LayerPass(
            plan=self.method.plan,
            options=self.method.options,
            target=self.method.target_of(self.layer_number - 1),
            documents=self.documents,
            noise=self._noise(),
            rotate=partial(self._rotate, rotary_pos_emb),
            sum_ranks=partial(_sum_ranks, group=heads_group(self.pg_collection)),
            first_rank=self._shard == 0,
            heads=self.config.num_query_groups,
            recorded=self.recorded is not None or self.held is not None,
        )

    def _rotate(
        self, rotary_pos_emb: Tensor | None, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply RoPE to query [s, b, g, r, d] and key [s, b, g, d]."""
        if self.method.fused:
            from dms_train.kernels.layers import triton_rope
            from dms_train.kernels.layers.types import EvictionChannel

            assert rotary_pos_emb is not None
            whole = EvictionChannel(0, 1.0, clear_after_rope=False)
            turned, key, _ = triton_rope.rotate(query, key, rotary_pos_emb, whole)
            return turned.view(query.shape), key
        cp = self.pg_collection.cp
        turned = apply_rotary_pos_emb(
            query.flatten(2, 3), rotary_pos_emb, config=self.config, cp_group=cp
        )
        key = apply_rotary_pos_emb(key, rotary_pos_emb, config=self.config, cp_group=cp)
        return turned.view(query.shape), key

    def _account(self, decided: Decided | None, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return log(1 - alpha) by key, or None, and eviction statistics; record them on request.

        `like` is any tensor [s, b, g, ...] of the layer.
        """
        if decided is None:
            if self.documents is not None:
                return None, self.documents.dense_eviction_stats(like.shape[2])
            return None, self.method.dense_eviction_stats(like)
        if self.recorded is not None:
            assert decided.logits is not None
            self.recorded.append(decided.logits)
        if self.held is not None:
            assert decided.held is not None
            self.held = self.held.to(decided.held.device) + decided.held.sum(0)
        return decided.log_keep, decided.stats

    def _noise(self) -> LayerNoise | None:
        """Return the noise of this rank's heads; None if the plan has none."""
        plan = self.method.plan
        if plan.eviction != "soft" or not plan.noise:
            return None
        assert self.noise_keys is not None
        first_head = self._shard * self.num_query_groups_per_partition
        return LayerNoise(self.noise_keys, self.layer_number, first_head)

    @property
    def _shard(self) -> int:
        """Index of this rank's heads among the ranks that share the heads."""
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        index: int = tp.rank() * cp.size() + cp.rank()
        return index


def _sum_ranks(x: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of a group, in the backward pass too."""
    return x if group.size() == 1 else all_reduce(x.contiguous(), group=group)


def _layer_kernels() -> LayerKernels:
    from dms_train.kernels.layers.triton_decide import decide, decide_merges
    from dms_train.kernels.layers.triton_merge import merge

    return LayerKernels(decide, decide_merges, merge)
