"""Self-attention that reads eviction decisions from the query and passes them to the kernels.

Shape letters: s positions, b samples, n query heads, g KV heads, r query heads per KV head,
d head size; heads are those of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dms_train.kernels.api import DMSAttention
from dms_train.method import decisions
from dms_train.method.accounting import slots_held_and_read
from dms_train.method.documents import PackedDocuments
from dms_train.method.noise import logistic_noise
from dms_train.method.plan import StepPlan
from dms_train.method.spec import DMSSpec
from dms_train.method.visibility import align_to_keys

_Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value and eviction channel


class MethodState:
    """What every layer of a model shares: constants, the kernel and the current step's plan.

    Holds per-step values only: with 1F1B and recomputation a per-microbatch value would be read
    again in another microbatch.
    """

    def __init__(self, spec: DMSSpec, attend: DMSAttention, *, fused: bool = False) -> None:
        self.spec = spec
        self.attend = attend
        self.fused = fused  # whether the fused kernels beside attention run; they need triton
        self.plan = StepPlan()
        self._dense_sides: dict[tuple[int, int, int], Tensor] = {}

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

    def dense_eviction_stats(self, eviction_channel: Tensor) -> Tensor:
        """Side sums [b, 3] where every slot stays: (alpha, live slots, reads / length)."""
        s, b, g = eviction_channel.shape
        found = self._dense_sides.get((s, b, g))
        if found is None or found.device != eviction_channel.device:
            # filled on the device: a tensor of Python numbers would wait for a copy
            values = (0.0, float(s * g), g * (s + 1) / 2)
            found = torch.stack(
                [torch.full((b,), v, device=eviction_channel.device) for v in values], 1
            )
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
        heads = self._fused_heads if self.method.fused else self._plain_heads
        query, key, value, eviction_channel = heads(hidden_states, rotary_pos_emb)
        log_keep, self.eviction_stats = self._decide(eviction_channel)
        cu_seqlens = None if self.documents is None else self.documents.cu_seqlens
        inputs = query, key, value, log_keep, cu_seqlens
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(self.core_attention, False, *inputs)
        else:
            context = self.core_attention(*inputs)
        return self.linear_proj(context)

    def _plain_heads(self, hidden_states: Tensor, rotary_pos_emb: Tensor | None) -> _Heads:
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        s, b, n, d = query.shape
        grouped = query.view(s, b, key.shape[2], -1, d)
        eviction_channel = decisions.eviction_channel(grouped, self.method.spec.channel)
        query = self._rotate_query(grouped, rotary_pos_emb).reshape(s, b, n, d)
        return query, self._rotate(key, rotary_pos_emb), value, eviction_channel

    def _fused_heads(self, hidden_states: Tensor, table: Tensor | None) -> _Heads:
        """The same in one kernel each way, from the projection's output where nothing norms it."""
        from dms_train.kernels.layers import triton_rope

        assert table is not None
        spec, d = self.method.spec, self.hidden_size_per_attention_head
        eviction_channel = triton_rope.EvictionChannel(
            spec.channel % d, self.method.plan.neuron_scale, spec.clear_after_rope
        )
        if not self.config.qk_layernorm:
            mixed, _ = self.linear_qkv(hidden_states)
            groups = self.num_query_groups_per_partition
            mixed = mixed.view(*mixed.shape[:2], groups, -1, d)
            return triton_rope.split_and_rotate(mixed, table, eviction_channel)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        grouped = query.view(*key.shape[:3], -1, d)
        query, key, raw = triton_rope.rotate(grouped, key, table, eviction_channel)
        return query, key, value, raw

    def _rotate(self, x: Tensor, rotary_pos_emb: Tensor | None) -> Tensor:
        return apply_rotary_pos_emb(
            x, rotary_pos_emb, config=self.config, cp_group=self.pg_collection.cp
        )

    def _rotate_query(self, query: Tensor, rotary_pos_emb: Tensor | None) -> Tensor:
        """RoPE on query [s, b, g, r, d] with the eviction channel multiplied by the plan's factor.

        When the eviction channel is also cleared after RoPE, full and cleared queries are
        interpolated, so that every path through the eviction channel carries the factor once and
        none carries its square.
        """
        spec, factor = self.method.spec, self.method.plan.neuron_scale
        if factor == 1.0:
            return self._rotate_groups(query, rotary_pos_emb)
        if not spec.clear_after_rope:
            return self._rotate_groups(
                decisions.scale_eviction_channel(query, spec.channel, factor), rotary_pos_emb
            )
        cleared = decisions.scale_eviction_channel(query, spec.channel, 0.0)
        cleared = self._rotate_groups(cleared, rotary_pos_emb)
        cleared = decisions.scale_eviction_channel(cleared, spec.channel, 0.0)
        if factor == 0.0:
            return cleared
        return torch.lerp(cleared, self._rotate_groups(query, rotary_pos_emb), factor)

    def _rotate_groups(self, query: Tensor, rotary_pos_emb: Tensor | None) -> Tensor:
        return self._rotate(query.flatten(2, 3), rotary_pos_emb).view(query.shape)

    def _decide(self, eviction_channel: Tensor) -> tuple[Tensor | None, Tensor]:
        """log(1 - alpha) by key [b, g, s], or None, and eviction statistics [b, 3]."""
        spec, plan, documents = self.method.spec, self.method.plan, self.documents
        if plan.eviction == "none":
            if documents is not None:
                return None, documents.dense_eviction_stats(eviction_channel.shape[-1])
            return None, self.method.dense_eviction_stats(eviction_channel)
        watched = self.recorded is not None or self.held is not None
        if self.method.fused and plan.eviction == "soft" and not watched:
            return self._decide_fused(eviction_channel)
        s, _, g = eviction_channel.shape
        logits = decisions.eviction_logits(eviction_channel, spec)
        if self.recorded is not None:
            self.recorded.append(logits.detach())
        hard = decisions.hard_decisions(logits.detach())
        if plan.eviction == "all":
            hard = torch.ones_like(hard)
        if plan.eviction == "soft":
            alpha, log_keep, straight_through = decisions.relax(
                logits, self._noise(s, g) if plan.noise else None, spec.tau
            )
            counted = straight_through if spec.alpha_in_loss == "hard_st" else alpha
        else:
            log_keep = torch.zeros_like(logits).masked_fill(hard, float("-inf"))
            counted = hard.to(logits.dtype)
        held, read = slots_held_and_read(hard.permute(1, 2, 0), spec, documents)
        if self.held is not None:
            self.held = self.held.to(held.device) + held.sum(0)
        if documents is not None:
            counted = counted * documents.is_token.t()[..., None]
        eviction_stats = torch.stack(
            [counted.sum((0, 2)), held.sum(1).float(), read.sum(1).float() / s], dim=-1
        )
        log_keep = log_keep.permute(1, 2, 0)
        return align_to_keys(log_keep, spec, keep=0.0, documents=documents), eviction_stats

    def _decide_fused(self, eviction_channel: Tensor) -> tuple[Tensor, Tensor]:
        from dms_train.kernels.layers.triton_decide import Noise, decide

        noise = None
        if self.method.plan.noise:
            assert self.noise_keys is not None
            first_head = self.pg_collection.tp.rank() * eviction_channel.shape[-1]
            noise = Noise(self.noise_keys, self.layer_number, first_head)
        return decide(eviction_channel, self.method.spec, noise, self.documents)

    def _noise(self, length: int, heads: int) -> Tensor:
        assert self.noise_keys is not None
        first_head = self.pg_collection.tp.rank() * heads
        return logistic_noise(self.noise_keys, self.layer_number, length, heads, first_head)
