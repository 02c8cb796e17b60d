"""Llama, Qwen2 and Qwen3 with Dynamic Memory Sparsification (DMS).

This file travels with the weights and needs only torch and transformers (4.57 or later). Each KV
head decides per token whether the token is dropped from its cache once it leaves a sliding
window. The decision is read from one borrowed channel of a query head, so the model has exactly
the weights of its dense original.

The cache keeps its full length and evicted tokens are masked: results are exact, memory is not
saved. Each token's decision is stored as one more channel of its value vector, so it follows the
token through everything transformers does with a cache (beams, cropping, batching).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_dms import (
    DMSNumbers,
    LlamaConfigDMS,
    Qwen2ConfigDMS,
    Qwen3ConfigDMS,
    dms_numbers,
)


def evicted_tokens(decisions: Tensor, shift: int) -> Tensor:
    """Move decisions to the tokens they govern; a token without a decision yet is kept.

    Args:
        decisions: bool [..., T] by deciding position.
        shift: Distance from a token to its decision.
    """
    shift = min(shift, decisions.shape[-1])
    return F.pad(decisions[..., shift:], (0, shift), value=False)


class DMSDecision(nn.Module):
    """Decision logits from the query states; hook it to observe decisions."""

    def __init__(self, numbers: DMSNumbers, group: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.group = group

    def forward(self, query: Tensor) -> Tensor:
        """query [batch, heads, T, d] before RoPE. Returns float32 [batch, kv_heads, T]."""
        lane = query[:, :: self.group, :, self.numbers.channel]
        lane = lane if lane.dtype == torch.float64 else lane.float()
        return self.numbers.scale * lane - self.numbers.offset

    def clear(self, query: Tensor) -> Tensor:
        """A copy of query [batch, heads, T, d] in which the lane is zero."""
        query = query.clone()
        query[:, :: self.group, :, self.numbers.channel] = 0
        return query


class _AttentionMixin:
    """Attention whose mask differs between KV heads."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.dms = DMSDecision(dms_numbers(config), self.num_key_value_groups)

    def _heads(self, projection: nn.Linear, hidden: Tensor, norm: str) -> Tensor:
        """Projected, normalised if the family does so: [batch, heads, T, d]."""
        states = projection(hidden).view(*hidden.shape[:-1], -1, self.head_dim)
        if hasattr(self, norm):
            states = getattr(self, norm)(states)
        return states.transpose(1, 2)

    def _remember(
        self, key: Tensor, value: Tensor, decisions: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append to the cache; all keys, values and decisions (bool [batch, kv_heads, T])."""
        if cache is None:
            return key, value, decisions
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"DMS keeps its decisions in a DynamicCache, not in a {type(cache).__name__}; "
                "leave cache_implementation unset"
            )
        marked = torch.cat([value, decisions.unsqueeze(-1).to(value.dtype)], dim=-1)
        key, marked = cache.update(key, marked, self.layer_idx)
        return key, marked[..., :-1], marked[..., -1] > 0.5

    def _mask(self, causal: Tensor, decisions: Tensor) -> Tensor:
        """Additive mask [batch, heads, queries, keys] from the causal one and the decisions."""
        queries, keys = causal.shape[-2:]
        numbers = self.dms.numbers
        if keys <= numbers.window + 1:
            return causal
        positions = torch.arange(keys, device=causal.device)
        late = positions[-queries:, None] - positions[None, :] > numbers.window
        gone = evicted_tokens(decisions, numbers.shift)[:, :, None, :] & late
        mask = causal.masked_fill(gone, torch.finfo(causal.dtype).min)
        return mask.repeat_interleave(self.num_key_value_groups, dim=1)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """As the family's attention; attention_mask is the 4D additive mask of eager attention."""
        if attention_mask is None or attention_mask.dim() != 4:
            raise ValueError("DMS needs a 4D mask: load with attn_implementation='eager'")
        query = self._heads(self.q_proj, hidden_states, "q_norm")
        key = self._heads(self.k_proj, hidden_states, "k_norm")
        value = self._heads(self.v_proj, hidden_states, "")
        decisions = self.dms(query) > 0
        query, key = apply_rotary_pos_emb(self.dms.clear(query), key, *position_embeddings)
        if self.dms.numbers.clear_after_rope:
            query = self.dms.clear(query)
        key, value, decisions = self._remember(key, value, decisions, past_key_values)
        output, weights = eager_attention_forward(
            self,
            query,
            key,
            value,
            self._mask(attention_mask, decisions),
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(output.flatten(2)), weights


class LlamaAttentionDMS(_AttentionMixin, LlamaAttention):
    """Llama attention with DMS."""


class Qwen2AttentionDMS(_AttentionMixin, Qwen2Attention):
    """Qwen2 attention with DMS."""


class Qwen3AttentionDMS(_AttentionMixin, Qwen3Attention):
    """Qwen3 attention with DMS."""


class _CausalLMMixin:
    """Replaces the attention layers and lets decisions be observed.

    `forward` stays the family's: `generate` reads its signature.
    """

    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention_class(config, number)
        self.post_init()

    @torch.no_grad()
    def dms_decision_logits(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Decision logits of every token; a token position evicts if its logit is > 0.

        Args:
            input_ids: int64 [batch, T].
            **kwargs: More arguments of `forward`, such as attention_mask.

        Returns:
            float32 [layers, batch, kv_heads, T].
        """
        seen: list[Tensor] = []
        hooks = [
            layer.self_attn.dms.register_forward_hook(lambda _, __, logits: seen.append(logits))
            for layer in self.model.layers
        ]
        try:
            self(input_ids, use_cache=False, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([logits.to(seen[0].device) for logits in seen])

    def dms_live_slots(self, past_key_values: DynamicCache) -> Tensor:
        """Tokens each KV head still needs after the last query, counting the window and padding.

        Returns:
            int64 [layers, batch, kv_heads]; sequence length / mean of it is the compression.
        """
        counts = []
        for layer, decoder in zip(past_key_values.layers, self.model.layers, strict=True):
            numbers = decoder.self_attn.dms.numbers
            gone = evicted_tokens(layer.values[..., -1] > 0.5, numbers.shift)
            outside = max(0, gone.shape[-1] - numbers.window - 1)
            counts.append(gone.shape[-1] - gone[..., :outside].sum(-1))
        return torch.stack([count.to(counts[0].device) for count in counts])


class LlamaForCausalLMDMS(_CausalLMMixin, LlamaForCausalLM):
    """Llama with DMS."""

    config_class = LlamaConfigDMS
    attention_class = LlamaAttentionDMS


class Qwen2ForCausalLMDMS(_CausalLMMixin, Qwen2ForCausalLM):
    """Qwen2 or Qwen2.5 with DMS."""

    config_class = Qwen2ConfigDMS
    attention_class = Qwen2AttentionDMS


class Qwen3ForCausalLMDMS(_CausalLMMixin, Qwen3ForCausalLM):
    """Qwen3 with DMS."""

    config_class = Qwen3ConfigDMS
    attention_class = Qwen3AttentionDMS
