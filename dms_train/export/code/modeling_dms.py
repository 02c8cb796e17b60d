"""Llama-like decoders with Dynamic Memory Sparsification (DMS).

This file and those it imports travel with the weights and need only torch and transformers (4.57
or later). An export adds the classes of its family at the end.

Each KV head decides per token whether the token is dropped from its cache once it
leaves a sliding window. The decision is read from one borrowed channel of a query head, so the
model has exactly the weights of its dense original.

`generate` frees what is evicted: greedy search and sampling run on `DMSCache`. Everything else
(beams, assisted generation, a plain `forward`, `cache_implementation="dynamic"`) keeps a
DynamicCache of full length in which evicted tokens are masked; each token's decision is stored as
one more channel of its value vector, so it follows the token through everything transformers does
with a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.generation import GenerationMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

# transformers 4 copies only the files imported here, not those that they import.
from dms_train.inference.cache.allocator import PageAllocator  # noqa: F401
from dms_train.inference.cache.base import Attended  # noqa: F401
from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import Arrival
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.kernels.decode.slots import attend_slots  # noqa: F401

from .configuration_dms import DMSNumbers, dms_numbers

_Mixed: Any = object  # stands for the class of transformers that a mixin precedes


def evicted_tokens(decisions: Tensor, shift: int) -> Tensor:
    """Move decisions to the tokens they govern; a token without a decision yet is kept.

    Args:
        decisions: bool [..., T] by deciding position.
        shift: Distance from a token to its decision.
    """
    shift = min(shift, decisions.shape[-1])
    return F.pad(decisions[..., shift:], (0, shift), value=False)


class _CountingLayer(CacheLayerMixin):
    """What transformers asks of a layer's cache; keys and values are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing to prepare."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: evicted keys cannot be returned."""
        raise ValueError("a DMSCache serves DMS attention only")

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask; query is a length or a tensor of positions."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen, padding and evicted ones included."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused; generate gives beams another cache."""
        raise ValueError("a DMSCache cannot be reordered; leave past_key_values unset")


class DMSCache(Cache):
    """A cache that frees what is evicted. Memory comes from one pool per device."""

    def __init__(self, numbers: DMSNumbers, layers: int) -> None:
        super().__init__(layers=[_CountingLayer() for _ in range(layers)])
        self._policy = DMSPolicy(numbers.window, numbers.shift)
        self._pools: dict[torch.device, PagePool] = {}
        self._stores: dict[int, CompactCache] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the system now, without page tables."""
        return sum(pool.allocated_bytes for pool in self._pools.values())

    def live(self) -> Tensor:
        """Tokens held, int64 [layers, batch, kv_heads]."""
        counts = [store.live(torch.arange(store.rows))[0].cpu() for store in self._stores.values()]
        return torch.stack(counts)

    def _open(self, layer: int, key: Tensor) -> CompactCache:
        batch, heads, _, size = key.shape
        pool = self._pools.setdefault(
            key.device, PagePool(head_size=size, state_width=1, dtype=key.dtype, device=key.device)
        )
        self._stores[layer] = CompactCache(pool, self._policy, layers=1, rows=batch, heads=heads)
        return self._stores[layer]

    def attend(self, layer: int, query: Tensor, arrival: Arrival, real: Tensor) -> Tensor:
        """Store tokens, drop what is dead, attend.

        Args:
            layer: Layer number.
            query: [batch, heads, T, d] with RoPE applied.
            arrival: The tokens; positions are filled in here.
            real: bool [batch, T], False for padding.

        Returns:
            [batch, heads, T, d].
        """
        store = self._stores.get(layer) or self._open(layer, arrival.key)
        start, n = self.layers[layer].length, real.shape[1]
        position = torch.arange(start, start + n, device=real.device)
        arrival = arrival._replace(position=torch.where(real, position, -1))
        rows = torch.arange(len(real), device=real.device)
        output = store.attend(0, rows, query, arrival).output
        self.layers[layer].length += n
        return output


class DMSDecision(nn.Module):
    """Decision logits from the query states; hook it to observe decisions."""

    def __init__(self, numbers: DMSNumbers, group: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.group = group

    def forward(self, query: Tensor) -> Tensor:
        """query [batch, heads, T, d] before RoPE. Returns float32 [batch, kv_heads, T]."""
        eviction_channel = query[:, :: self.group, :, self.numbers.channel]
        eviction_channel = (
            eviction_channel
            if eviction_channel.dtype == torch.float64
            else eviction_channel.float()
        )
        return self.numbers.scale * eviction_channel - self.numbers.offset

    def clear(self, query: Tensor) -> Tensor:
        """A copy of query [batch, heads, T, d] in which the eviction channel is zero."""
        query = query.clone()
        query[:, :: self.group, :, self.numbers.channel] = 0
        return query


class _AttentionMixin(_Mixed):
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
    ) -> tuple[Tensor, Tensor | None]:
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
        if isinstance(past_key_values, DMSCache):
            real = attention_mask[:, 0, -1, -query.shape[2] :] == 0
            real = real.expand(query.shape[0], -1)
            arrival = Arrival(real, key, value, decisions)
            output = past_key_values.attend(self.layer_idx, query, arrival, real)
            return self.o_proj(output.transpose(1, 2).flatten(2)), None
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


def attention_with_dms(base: type) -> type:
    """A family's attention class of transformers (`LlamaAttention`) with DMS."""
    values = {"__doc__": f"{base.__name__} with DMS."}
    return type(f"{base.__name__}DMS", (_AttentionMixin, base), values)


class _CausalLMMixin(_Mixed):
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

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, *rest: Any
    ) -> Any:
        """As in transformers, with a cache that shrinks where nothing speaks against it."""
        given = model_kwargs.get("past_key_values")
        done = super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *rest)
        plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        asked = generation_config.cache_implementation or generation_config.output_attentions
        made = model_kwargs.get("past_key_values")
        if given is None and plain and not asked and type(made) is DynamicCache:
            numbers = self.model.layers[0].self_attn.dms.numbers
            model_kwargs["past_key_values"] = DMSCache(numbers, len(self.model.layers))
        return done

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

    def dms_live_slots(self, past_key_values: Cache) -> Tensor:
        """Tokens each KV head still needs after the last query, counting the window.

        A DynamicCache counts padding, a DMSCache holds none.

        Returns:
            int64 [layers, batch, kv_heads]; sequence length / mean of it is the compression.
        """
        if isinstance(past_key_values, DMSCache):
            return past_key_values.live()
        counts = []
        for layer, decoder in zip(past_key_values.layers, self.model.layers, strict=True):
            numbers = decoder.self_attn.dms.numbers
            gone = evicted_tokens(layer.values[..., -1] > 0.5, numbers.shift)
            outside = max(0, gone.shape[-1] - numbers.window - 1)
            counts.append(gone.shape[-1] - gone[..., :outside].sum(-1))
        return torch.stack([count.to(counts[0].device) for count in counts])


def model_with_dms(base: type, config: type, attention: type) -> type:
    """A family's model class with DMS.

    Args:
        base: A class of transformers such as `LlamaForCausalLM`.
        config: From `config_with_dms`.
        attention: From `attention_with_dms`; replaces the attention of every layer.

    Returns:
        `LlamaForCausalLMDMS`.
    """
    values = {
        "__doc__": f"{base.__name__} with DMS.",
        "config_class": config,
        "attention_class": attention,
    }
    return type(f"{base.__name__}DMS", (_CausalLMMixin, base), values)
