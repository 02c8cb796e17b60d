"""Models retrofitted with Dynamic Memory Compression (DMC), for transformers.

This file is shipped with the weights and needs only torch and transformers (4.57 or later).
`modeling_<family>_dmc.py` defines the classes of the model family.

The cache keeps one entry for every token: the merged state of its slot, and, next to the value,
what later tokens merge. The state of a slot that a later token continues is masked. Transformers
moves all of it with the token. This saves no memory; the engine of the package that wrote this file
keeps the slots alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_dmc import DMCNumbers, dmc_numbers

__all__ = ["DMCAttention", "DMCForCausalLM"]

_Mixed: Any = object  # a mixin precedes a class of transformers, whose type is not known here
_SMALLEST_WEIGHT = 1e-6


class DMCDecision(nn.Module):
    """Decision logits from the key states. A forward hook observes them."""

    def __init__(self, numbers: DMCNumbers) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, key: Tensor) -> Tensor:
        """Map key [batch, kv_heads, T, d] before RoPE to float32 [batch, kv_heads, T]."""
        activation = key[..., self.numbers.channel]
        if self.numbers.shared:
            activation = activation[:, :1].expand_as(activation)
        wide = activation if activation.dtype == torch.float64 else activation.float()
        return self.numbers.scale * wide - self.numbers.offset

    def weights(self, query: Tensor) -> Tensor:
        """Map query [batch, kv_heads, group, T, d] before RoPE to weights [batch, kv_heads, T]."""
        activation = query[..., self.numbers.channel].mean(2)
        if self.numbers.shared:
            activation = activation[:, :1].expand_as(activation)
        wide = activation if activation.dtype == torch.float64 else activation.float()
        if self.numbers.uniform:
            return torch.ones_like(wide)
        return torch.sigmoid(wide + self.numbers.weight_offset) + _SMALLEST_WEIGHT

    def clear(self, x: Tensor) -> Tensor:
        """Copy x [..., d] with zeros in the eviction channel."""
        x = x.clone()
        x[..., self.numbers.channel] = 0
        return x


def merged(raw: Tensor, alpha: Tensor, weight: Tensor, width: int) -> Tensor:
    """Average every token with the earlier tokens of its slot.

    Args:
        raw: [batch, kv_heads, T, n].
        alpha: 1 for a token that continues the slot of the token before it,
            [batch, kv_heads, T].
        weight: Weights of the same shape; 0 for padding.
        width: Most tokens of an average.
    """
    wide = weight.dtype
    share, total = torch.ones_like(weight), weight
    result = raw.to(wide) * weight[..., None]
    for m in range(1, min(width, raw.shape[2])):
        share = share[..., 1:] * alpha[..., 1 : alpha.shape[-1] - m + 1]
        part = share * weight[..., :-m]
        result = result + F.pad(part[..., None] * raw[..., :-m, :].to(wide), (0, 0, m, 0))
        total = total + F.pad(part, (m, 0))
    return (result / total.clamp(min=torch.finfo(wide).tiny)[..., None]).to(raw.dtype)


class DMCAttention(_Mixed):
    """Mixin for the attention class of a family: merged states, a mask for each KV head.

    Attributes:
        rotate: RoPE of the family.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if getattr(self, "sliding_window", None) is not None:
            raise ValueError("DMC does not support layers with a sliding window")
        self.dmc = DMCDecision(dmc_numbers(config))

    def _project(self, hidden: Tensor) -> list[Tensor]:
        """Return queries, keys and values, [batch, heads, T, d]; normalised if the family does."""
        if hasattr(self, "qkv_proj"):  # Phi-3 has one matrix
            keys = self.config.num_key_value_heads * self.head_dim
            mixed = self.qkv_proj(hidden)
            states = list(mixed.split((mixed.shape[-1] - 2 * keys, keys, keys), -1))
        else:
            states = [p(hidden) for p in (self.q_proj, self.k_proj, self.v_proj)]
        for number, norm in enumerate(("q_norm", "k_norm")):
            if hasattr(self, norm):
                normalise = getattr(self, norm)
                width = normalise.weight.shape[0]  # a head, or all heads as in OLMo 3
                states[number] = normalise(states[number].unflatten(-1, (-1, width))).flatten(-2)
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in states]

    def _before(self, cache: Cache | None, like: Tensor) -> Tensor:
        """Read what new tokens merge from the cache, [batch, kv_heads, tokens, 2 d + 2]."""
        if cache is None or cache.get_seq_length(self.layer_idx) == 0:
            return like[:, :, :0]
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"DMC keeps its tokens in a DynamicCache, not in a {type(cache).__name__}; "
                "leave cache_implementation unset"
            )
        first = max(0, cache.get_seq_length(self.layer_idx) - self.dmc.numbers.width + 1)
        return cache.layers[self.layer_idx].values[:, :, first:, self.head_dim :]

    def _mask(self, causal: Tensor, alpha: Tensor) -> Tensor:
        """Hide the states that a later token continues: additive [batch, heads, queries, keys]."""
        queries, keys = causal.shape[-2:]
        continued = F.pad(alpha[..., 1:], (0, 1)) > 0.5
        at = torch.arange(keys - queries, keys, device=causal.device)
        earlier = torch.arange(keys, device=causal.device) < at[:, None]
        gone = continued[:, :, None, :] & earlier
        mask = causal.masked_fill(gone, torch.finfo(causal.dtype).min)
        return mask.repeat_interleave(self.num_key_value_groups, dim=1)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to merged states; attention_mask is the 4D mask of eager attention."""
        # its name differs between versions of transformers
        cache = next((x for x in kwargs.values() if isinstance(x, Cache)), None)
        if attention_mask is None or attention_mask.dim() != 4:
            raise ValueError("DMC needs a 4D mask: load with attn_implementation='eager'")
        query, key, value = self._project(hidden_states)
        n = key.shape[2]
        real = attention_mask[:, 0, -1, -n:] == 0
        weight = self.dmc.weights(query.unflatten(1, (key.shape[1], -1))) * real[:, None]
        alpha = (self.dmc(key) > 0).to(weight.dtype)
        query, key = self.dmc.clear(query), self.dmc.clear(key)
        marks = torch.stack([alpha, weight], -1).to(value.dtype)
        left = torch.cat([marks, key, value], -1)
        whole = torch.cat([self._before(cache, left), left], 2)
        alphas, weights = whole[..., :2].to(weight.dtype).unbind(-1)
        states = merged(whole[..., 2:], alphas, weights, self.dmc.numbers.width)[:, :, -n:]
        key, value = states.split(self.head_dim, -1)
        if getattr(self, "use_rope", True):  # SmolLM3 has layers without RoPE
            query, key = self.rotate(query, key, *position_embeddings)
        if cache is not None:
            stored = torch.cat([value, left], -1)
            key, stored = cache.update(key, stored, self.layer_idx)
            value, alpha = stored[..., : self.head_dim], stored[..., self.head_dim]
        output, weights = eager_attention_forward(
            self,
            query,
            key,
            value,
            self._mask(attention_mask, alpha),
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(output.flatten(2)), weights


class DMCForCausalLM(_Mixed):
    """Mixin for the model class of a family: other attention layers, and access to decisions.

    Attributes:
        attention_class: Attention of every layer: `DMCAttention` with the family's class.
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
    def dmc_decision_logits(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Compute decision logits; a token is merged with the one before it if its logit is > 0.

        Args:
            input_ids: int64 [batch, T].
            **kwargs: More arguments of `forward`, such as attention_mask.

        Returns:
            float32 [layers, batch, kv_heads, T].
        """
        seen: list[Tensor] = []
        hooks = [
            layer.self_attn.dmc.register_forward_hook(lambda _, __, logits: seen.append(logits))
            for layer in self.model.layers
        ]
        try:
            self(input_ids, use_cache=False, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([logits.to(seen[0].device) for logits in seen])
