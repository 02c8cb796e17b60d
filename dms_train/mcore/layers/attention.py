"""Self-attention that reads eviction decisions from the query and passes them to the kernels.

Shape letters: s positions, b samples, n query heads, g KV heads, r query heads per KV head,
d head size; heads are those of this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from dms_train.kernels.train_attention.interface import DMSAttention
from dms_train.mcore.options import EVICTION_STATS
from dms_train.method.base import MethodSpec
from dms_train.method.dmc.attention import DMCLayer, Kernels
from dms_train.method.dms.attention import DMSLayer
from dms_train.method.documents import PackedDocuments
from dms_train.method.layer import Decided, Heads, LayerPass, method_layer
from dms_train.method.noise import LayerNoise
from dms_train.method.plan import StepPlan
from dms_train.method.schedule import evicted_fraction


class MethodState:
    """State that all layers of a model share: constants, the kernel and the current step's plan.

    Holds per-step values only: with 1F1B and recomputation a per-microbatch value would be read
    again in another microbatch.

    Args:
        spec: Method of the model.
        attend: Attention kernel.
        fused_on: Device on which the fused kernels beside attention run, which need triton; None
            for plain operations.
    """

    def __init__(
        self,
        spec: MethodSpec,
        attend: DMSAttention,
        *,
        fused_on: torch.device | None = None,
    ) -> None:
        self.spec = spec
        self.layer = method_layer(spec)
        self.fused = fused_on is not None
        if self.fused and spec.kind == "dmc":
            from dms_train.kernels.layers.triton_decide import decide_merges
            from dms_train.kernels.layers.triton_merge import merge

            self.layer = DMCLayer(spec, Kernels(decide_merges, merge))
        self.attend = attend
        self.plan = StepPlan()
        self.step: int | Tensor = 0
        self.target: float | Tensor = 0.0
        self.neuron_scale: float | Tensor = 1.0
        if fused_on is not None:
            # at addresses that stay, so that a CUDA graph reads the values of the current step
            self.step = torch.zeros((), dtype=torch.int64, device=fused_on)
            self.target = torch.zeros((), dtype=torch.float64, device=fused_on)
            self.neuron_scale = torch.ones((), device=fused_on)
        self._dense_sides: dict[tuple[int, int, int], Tensor] = {}

    def set_plan(self, plan: StepPlan) -> None:
        """Make `plan` the plan of the next passes."""
        self.plan = plan
        values = {
            "step": plan.step,
            "target": evicted_fraction(plan.target_cr),
            "neuron_scale": plan.neuron_scale,
        }
        for name, value in values.items():
            if self.fused:
                getattr(self, name).fill_(value)
            else:
                setattr(self, name, value)

    def computation(self, plan: StepPlan) -> StepPlan:
        """Return the plan without the numbers that passes read from tensors."""
        if not self.fused:
            return plan
        scale = 1.0 if isinstance(self.layer, DMSLayer) else plan.neuron_scale
        return replace(plan, step=0, stage_step=0, target_cr=1.0, neuron_scale=scale)

    def rope(self, frequencies: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        """What the layers are given of megatron's frequencies [s, 1, 1, d].

        With packed documents each sample has its own rows, those of its positions.
        """
        at = None if documents is None else documents.positions.t().contiguous()
        if not self.fused:
            return frequencies if at is None else frequencies[at, 0]
        from dms_train.kernels.layers.triton_rope import rope_table

        table = rope_table(frequencies)
        return table if at is None else table[at]

    def dense_eviction_stats(self, like: Tensor) -> Tensor:
        """Side sums [b, 3] where every slot stays: (alpha, live slots, reads / length).

        Of a layer with a tensor [s, b, g, ...] like this one.
        """
        s, b, g = like.shape[:3]
        found = self._dense_sides.get((s, b, g))
        if found is None or found.device != like.device:
            # filled on the device: a tensor of Python numbers would wait for a copy
            values = (0.0, float(s * g), g * (s + 1) / 2)
            found = torch.stack([torch.full((b,), v, device=like.device) for v in values], 1)
            self._dense_sides[s, b, g] = found
        return found


class CoreAttention(MegatronModule):
    """The kernel call, as the module that megatron's spec and selective recomputation expect."""

    def __init__(
        self, config: Any, method: MethodState, softmax_scale: float | None = None, **_: Any
    ):
        super().__init__(config=config)
        self.method = method
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_keep: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """query [s, b, n, d], key and value [s, b, g, d], log_keep [b, g, s]; to [s, b, n * d].

        `cu_seqlens` are the bounds of packed documents in the samples behind each other.
        """
        heads = [t.transpose(0, 1) for t in (query, key, value)]
        if cu_seqlens is not None:  # the kernels take documents of one sample
            heads = [t.reshape(1, -1, *t.shape[2:]) for t in heads]
            if log_keep is not None:
                log_keep = log_keep.transpose(0, 1).flatten(1)[None]
        q, k, v = heads
        out = self.method.attend(q, k, v, log_keep, self.method.spec.window, self.scale, cu_seqlens)
        s, b, n, d = query.shape
        return out.view(b, s, n, d).transpose(0, 1).reshape(s, b, -1)


class DMSSelfAttention(SelfAttention):
    """Megatron's self-attention with an eviction channel.

    The block sets `noise_keys` and `documents` right before each call and takes `eviction_stats`
    right after it, inside the recomputed unit; they belong to one microbatch only.
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, method: MethodState, **kwargs: Any
    ):
        super().__init__(config, submodules, *args, **kwargs)
        self.method = method
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
        """Attend within hidden_states [s, b, h]; the mask is always causal."""
        if self.method.fused and isinstance(self.method.layer, DMSLayer):
            heads, eviction_channel = self._fused_heads(hidden_states, rotary_pos_emb)
            log_keep, stats = self._decide(eviction_channel)
        else:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            grouped = query.view(*key.shape[:3], -1, key.shape[3])
            projected = Heads(grouped, key, value)
            heads, decided = self.method.layer.prepare(projected, self._pass(rotary_pos_emb))
            log_keep, stats = self._account(decided, key)
        self.eviction_stats = F.pad(stats, (0, EVICTION_STATS - stats.shape[1]))
        cu_seqlens = None if self.documents is None else self.documents.cu_seqlens
        inputs = heads.query.flatten(2, 3), heads.key, heads.value, log_keep, cu_seqlens
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(self.core_attention, False, *inputs)
        else:
            context = self.core_attention(*inputs)
        return self.linear_proj(context)

    def _pass(self, rotary_pos_emb: Tensor | None) -> LayerPass:
        """What the method is told of this microbatch."""
        ranks = self.pg_collection.tp
        return LayerPass(
            plan=self.method.plan,
            target=self.method.target,
            documents=self.documents,
            noise=self._noise(),
            rotate=partial(self._rotate, rotary_pos_emb),
            sum_ranks=partial(_sum_ranks, group=ranks),
            first_rank=ranks.rank() == 0,
            heads=self.config.num_query_groups,
            recorded=self.recorded is not None or self.held is not None,
        )

    def _fused_heads(self, hidden_states: Tensor, table: Tensor | None) -> tuple[Heads, Tensor]:
        """Rotated heads and eviction channel by one kernel each way.

        It reads the projection's output where nothing norms that.
        """
        from dms_train.kernels.layers import triton_rope
        from dms_train.kernels.layers.types import EvictionChannel

        assert table is not None
        spec, d = self.method.spec, self.hidden_size_per_attention_head
        eviction_channel = EvictionChannel(
            spec.channel % d, self.method.neuron_scale, spec.clear_after_rope
        )
        if not self.config.qk_layernorm:
            mixed, _ = self.linear_qkv(hidden_states)
            groups = self.num_query_groups_per_partition
            mixed = mixed.view(*mixed.shape[:2], groups, -1, d)
            query, key, value, raw = triton_rope.split_and_rotate(mixed, table, eviction_channel)
        else:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            grouped = query.view(*key.shape[:3], -1, d)
            query, key, raw = triton_rope.rotate(grouped, key, table, eviction_channel)
        return Heads(query.view(*key.shape[:3], -1, d), key, value), raw

    def _rotate(
        self, rotary_pos_emb: Tensor | None, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """RoPE on query [s, b, g, r, d] and key [s, b, g, d]."""
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
        """log(1 - alpha) by key, or None, and eviction statistics; recorded where asked for.

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

    def _decide(self, eviction_channel: Tensor) -> tuple[Tensor | None, Tensor]:
        """`_account` of the decisions of DMS; in training by a kernel where kernels are fused."""
        layer, step = self.method.layer, self._pass(None)
        assert isinstance(layer, DMSLayer)
        if self.method.fused and step.plan.eviction == "soft" and not step.recorded:
            from dms_train.kernels.layers.triton_decide import decide

            return decide(eviction_channel, self.method.spec, step.noise, self.documents)
        return self._account(layer.decide(eviction_channel, step), eviction_channel)

    def _noise(self) -> LayerNoise | None:
        """Of this rank's heads; None where the plan has none."""
        plan = self.method.plan
        if plan.eviction != "soft" or not plan.noise:
            return None
        assert self.noise_keys is not None
        heads = self.num_query_groups_per_partition
        first_head = self.pg_collection.tp.rank() * heads
        return LayerNoise(self.noise_keys, self.layer_number, first_head)


def _sum_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum over tensor-parallel ranks; its gradient is summed over them too."""
    return x if group.size() == 1 else all_reduce(x.contiguous(), group=group)
