"""Llama-like decoders with Dynamic Memory Sparsification (DMS).

This file and those it imports are shipped with the weights and need only torch and transformers
(4.57 or later). `modeling_<family>_dms.py` defines the classes of the model family.

Each KV head decides for every token whether the token is evicted once it leaves a sliding window.
The decision is read from one channel of a query head, so that the model has exactly the weights of
its dense original.

`generate` frees what is evicted: greedy search, sampling and beam search run on `DMSCache`.
Everything else (assisted generation, which takes tokens back; a plain `forward`;
`cache_implementation="dynamic"`) keeps a DynamicCache of full length and masks evicted tokens.
There each token's decision is stored as one more channel of its value vector, so that transformers
moves it with the token.

Queries attend in blocks, so that no tensor of [T, T] exists. The masks of transformers are used for
packed sequences, for 4D masks of the caller, and when attention weights are requested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMode

from .adapter_dms import AdapterLoading
from .configuration_dms import DMSNumbers, dms_numbers
from .generation_dms import DMSCache
from .pages_dms import block_queries, sink_softmax

__all__ = ["DMSAttention", "DMSForCausalLM"]

_Mixed: Any = object  # a mixin precedes a class of transformers, whose type is not known here
_SHRINKING = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


def name_of_cache(arguments: dict[str, Any]) -> str:
    """Return the name of the cache, which differs between versions of transformers; or ""."""
    return next((name for name, value in arguments.items() if isinstance(value, Cache)), "")


def evicted_tokens(decisions: Tensor, shift: int) -> Tensor:
    """Move decisions to the tokens they govern; tokens without a decision are kept.

    Args:
        decisions: bool [..., T] by deciding position.
        shift: Distance from a token to its decision.
    """
    shift = min(shift, decisions.shape[-1])
    return F.pad(decisions[..., shift:], (0, shift), value=False)


class DMSDecision(nn.Module):
    """Decision logits from the query states. A forward hook observes them."""

    def __init__(self, numbers: DMSNumbers, group: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.group = group

    def forward(self, query: Tensor) -> Tensor:
        """Map query [batch, heads, T, d] before RoPE to float32 [batch, kv_heads, T]."""
        eviction_channel = query[:, :: self.group, :, self.numbers.channel]
        eviction_channel = (
            eviction_channel
            if eviction_channel.dtype == torch.float64
            else eviction_channel.float()
        )
        return self.numbers.scale * eviction_channel - self.numbers.offset

    def clear(self, query: Tensor) -> Tensor:
        """Copy query [batch, heads, T, d] with zeros in the eviction channel."""
        query = query.clone()
        query[:, :: self.group, :, self.numbers.channel] = 0
        return query


class DMSAttention(_Mixed):
    """Mixin for the attention class of a family, whose mask then differs between KV heads.

    In a layer with a sliding window every token is evicted when it leaves that window. There are no
    decisions, and the query keeps its eviction channel.

    Attributes:
        rotate: RoPE of the family.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        numbers, size = dms_numbers(config), getattr(self, "sliding_window", None)
        self.has_window = size is not None
        if size is not None:
            numbers = replace(numbers, window=size - 1, shift=0)
        self.dms = DMSDecision(numbers, self.num_key_value_groups)

    @property
    def _sinks(self) -> Tensor | None:
        """Logits [heads] in the denominators of the softmax, as in gpt-oss; None for none."""
        return getattr(self, "sinks", None)

    def _decide(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return decisions, bool [batch, kv_heads, T], and the query without them."""
        if self.has_window:
            return torch.ones_like(query[:, :: self.num_key_value_groups, :, 0]) > 0, query
        return self.dms(query) > 0, self.dms.clear(query)

    def _project(self, hidden: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Project the hidden states of a layer.

        Returns:
            Queries, keys and values, [batch, heads, T, d], normalised if the family does; and the
            factor on the output of attention [batch, T, heads d], None in a family without.
        """
        if hasattr(self, "qkv_proj"):  # Phi-3 has one matrix
            keys = self.config.num_key_value_heads * self.head_dim
            mixed = self.qkv_proj(hidden)
            states = list(mixed.split((mixed.shape[-1] - 2 * keys, keys, keys), -1))
        else:
            states = [p(hidden) for p in (self.q_proj, self.k_proj, self.v_proj)]
        states[0], gate = self._without_gate(states[0])
        for number, norm in enumerate(("q_norm", "k_norm")):
            if hasattr(self, norm):
                normalise = getattr(self, norm)
                width = normalise.weight.shape[0]  # a head, or all heads as in OLMo 3
                states[number] = normalise(states[number].unflatten(-1, (-1, width))).flatten(-2)
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in states], gate

    def _without_gate(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the output gate off the queries, with which its rows alternate by heads."""
        if query.shape[-1] == self.config.num_attention_heads * self.head_dim:
            return query, None
        query, gate = query.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        return query.flatten(-2), gate.flatten(-2).sigmoid()

    def _output(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Map the outputs of attention [batch, heads, T, d] to those of the layer."""
        joined = attended.transpose(1, 2).flatten(2)
        return self.o_proj(joined if gate is None else joined * gate)

    def _remember(
        self, key: Tensor, value: Tensor, decisions: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append to the cache; return all of it, decisions as bool [batch, kv_heads, T]."""
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

    def _gone(self, evicted: Tensor, queries: Tensor) -> Tensor:
        """Find the keys that queries do not read: bool [batch, kv_heads, queries, keys].

        Args:
            evicted: bool [batch, kv_heads, keys], True for a key that is hidden beyond the window.
            queries: Positions of the queries, int64 [queries].
        """
        keys = torch.arange(evicted.shape[-1], device=evicted.device)
        late = queries[:, None] - keys[None, :] > self.dms.numbers.window
        return evicted[:, :, None, :] & late

    def _mask(self, causal: Tensor, evicted: Tensor) -> Tensor:
        """Add evictions to the causal mask: additive [batch, heads, queries, keys]."""
        queries, keys = causal.shape[-2:]
        gone = self._gone(evicted, torch.arange(keys - queries, keys, device=causal.device))
        mask = causal.masked_fill(gone, torch.finfo(causal.dtype).min)
        return mask.repeat_interleave(self.num_key_value_groups, dim=1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, real: Tensor
    ) -> Tensor:
        """Compute attention of the last tokens in blocks of queries.

        Args:
            query: [batch, heads, T, d].
            key: [batch, kv_heads, keys, d].
            value: [batch, kv_heads, keys, d].
            evicted: bool [batch, kv_heads, keys].
            real: bool [batch or 1, 1, 1, keys], False for padding.

        Returns:
            [batch, heads, T, d].
        """
        batch, heads, n, d = query.shape
        kv_heads, keys = key.shape[1:3]
        wide = torch.promote_types(query.dtype, torch.float32)
        dropout = self.attention_dropout if self.training else 0.0
        positions = torch.arange(keys, device=query.device)
        outputs = []
        for block in torch.arange(n, device=query.device).split(block_queries(batch * heads, keys)):
            at = block + keys - n
            read = real & (positions <= at[:, None]) & ~self._gone(evicted, at)
            grouped = query[:, :, block].reshape(batch, kv_heads, -1, d)  # a group's heads together
            scores = grouped @ key.transpose(2, 3) * self.scaling
            scores = scores.view(batch, kv_heads, -1, len(block), keys)
            scores = scores.masked_fill(~read[:, :, None], torch.finfo(scores.dtype).min)
            sinks = None if self._sinks is None else self._sinks.view(kv_heads, -1, 1)
            weights = sink_softmax(scores, sinks, wide)
            weights = F.dropout(weights.to(query.dtype), dropout)
            outputs.append((weights.flatten(2, 3) @ value).view(batch, heads, len(block), d))
        return torch.cat(outputs, 2)

    def _attend_masked(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute attention under an additive mask; return outputs and weights of all heads."""
        key, value = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (key, value))
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query @ key.transpose(2, 3) * self.scaling + mask
        sinks = None if self._sinks is None else self._sinks.view(-1, 1)
        weights = sink_softmax(scores, sinks, wide).to(query.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        weights = F.dropout(weights, dropout)
        return weights @ value, weights

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what the family's attention computes, with evicted tokens hidden.

        attention_mask is 4D: bool [batch or 1, 1, 1, keys] from `_columns_only`, or the additive
        mask of eager attention. With the latter, attention weights are returned too.
        """
        cache = kwargs.get(name_of_cache(kwargs))
        if attention_mask is None or attention_mask.dim() != 4:
            raise ValueError("DMS needs a 4D mask: load with attn_implementation='eager'")
        (query, key, value), gate = self._project(hidden_states)
        decisions, query = self._decide(query)
        if getattr(self, "use_rope", True):  # SmolLM3 has layers without RoPE
            query, key = self.rotate(query, key, *position_embeddings)
            # OLMo 3 rotates in float32
            query, key = query.to(value.dtype), key.to(value.dtype)
        if self.dms.numbers.clear_after_rope and not self.has_window:
            query = self.dms.clear(query)
        if isinstance(cache, DMSCache):
            tokens = (key, value, decisions)
            if self.scaling != self.head_dim**-0.5:  # by which the cache multiplies scores
                query = query * (self.scaling * self.head_dim**0.5)
            output = cache.attend(self.layer_idx, query, tokens, attention_mask, self._sinks)
            return self._output(output, gate), None
        key, value, decisions = self._remember(key, value, decisions, cache)
        evicted = evicted_tokens(decisions, self.dms.numbers.shift)
        if attention_mask.dtype == torch.bool:
            # a DynamicCache may have dropped the keys before a sliding window
            real = attention_mask[..., -key.shape[2] :]
            output = self._attend(query, key, value, evicted, real)
            return self._output(output, gate), None
        output, weights = self._attend_masked(
            query, key, value, self._mask(attention_mask, evicted)
        )
        return self._output(output, gate), weights


def _columns_only(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the mask by bool [batch or 1, 1, 1, keys], True for columns that are no padding.

    A hook before `forward` of the decoder. The decoder passes a 4D mask on as it is; without the
    hook it would make an additive mask [batch, 1, T, keys]. It still does when more than causality
    is needed.
    """
    mask, past = kwargs.get("attention_mask"), kwargs.get(name_of_cache(kwargs))
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    weights = kwargs.get("output_attentions")
    weights = getattr(model.config, "output_attentions", False) if weights is None else weights
    packed = mask is None and past is None and kwargs.get("position_ids") is not None
    if args or tokens is None or weights or packed:
        return None
    keys = tokens.shape[1] + (0 if past is None else past.get_seq_length())
    if mask is None:
        mask = torch.ones(1, keys, dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, Tensor) or mask.shape[1:] != (keys,):
        return None
    columns = mask.to(tokens.device).bool()
    return args, {**kwargs, "attention_mask": _by_layer(model.config, columns, tokens.shape[1])}


def _by_layer(config: Any, columns: Tensor, length: int) -> Any:
    """Return the mask of the layers from columns, bool [batch or 1, keys].

    Linear attention takes the columns of the new tokens, and only if there is padding.
    """
    mask = columns[:, None, None]
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return mask
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise RuntimeError(
            "a model with linear attention needs transformers 5 or later, not "
            f"{transformers.__version__}; upgrade it"
        )
    new = columns[:, -length:]
    linear = None if length == 1 or bool(new.all()) else new
    return {"full_attention": mask, "linear_attention": linear}


class DMSForCausalLM(AdapterLoading):
    """Mixin for the model class of a family: other attention layers, and access to decisions.

    `forward` stays the family's: `generate` reads its signature.

    Attributes:
        attention_class: Attention of every layer: `DMSAttention` with the family's class.
        dms_kernels: The `kernels` of the caches that `generate` makes; see `DMSCache`.
    """

    dms_kernels = "auto"

    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            if hasattr(layer, "self_attn"):  # layers of linear attention stay as they are
                layer.self_attn = self.attention_class(config, number)
        self.model.register_forward_pre_hook(_columns_only, with_kwargs=True)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, *rest: Any
    ) -> Any:
        """Make a DMSCache unless an option requires a cache of full length.

        Raises:
            ValueError: A DMSCache is given for assisted generation.
        """
        given = model_kwargs.get(name_of_cache(model_kwargs))
        if isinstance(given, DMSCache) and mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "assisted generation takes tokens back, which a DMSCache may have evicted; leave "
                "past_key_values unset or pass a DynamicCache"
            )
        done = super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *rest)
        configured = generation_config.cache_implementation or generation_config.output_attentions
        rolled_back = generation_config.is_assistant
        name = name_of_cache(model_kwargs)
        shrinks = mode in _SHRINKING and not configured and not rolled_back
        if given is None and shrinks and type(model_kwargs.get(name)) is DynamicCache:
            numbers = [
                layer.self_attn.dms.numbers if hasattr(layer, "self_attn") else None
                for layer in self.model.layers
            ]
            model_kwargs[name] = DMSCache(numbers, len(numbers), self.dms_kernels)
        return done

    @torch.no_grad()
    def dms_decision_logits(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Compute the decision logits of every token; a position evicts if its logit is > 0.

        Args:
            input_ids: int64 [batch, T].
            **kwargs: More arguments of `forward`, such as attention_mask.

        Returns:
            float32 [layers, batch, kv_heads, T]; layers with a sliding window or linear attention
            have none.
        """
        seen: list[Tensor] = []
        hooks = [
            layer.self_attn.dms.register_forward_hook(lambda _, __, logits: seen.append(logits))
            for layer in self._dms_layers()
        ]
        try:
            self(input_ids, use_cache=False, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([logits.to(seen[0].device) for logits in seen])

    def _dms_layers(self) -> list[Any]:
        """Decoder layers with decisions: neither linear nor with a sliding window."""
        attending = [layer for layer in self.model.layers if hasattr(layer, "self_attn")]
        return [layer for layer in attending if not layer.self_attn.has_window]

    def dms_live_slots(self, past_key_values: Cache) -> Tensor:
        """Count the tokens that each KV head needs after the last query, including the window.

        In a DynamicCache padding counts; a DMSCache holds none.

        Returns:
            int64 [layers, batch, kv_heads] of the layers with decisions. Compression is the
            sequence length over their mean.
        """
        attentions = [layer.self_attn for layer in self._dms_layers()]
        if isinstance(past_key_values, DMSCache):
            return past_key_values.live()[[attention.layer_idx for attention in attentions]]
        counts = []
        for attention in attentions:
            numbers, layer = attention.dms.numbers, past_key_values.layers[attention.layer_idx]
            gone = evicted_tokens(layer.values[..., -1] > 0.5, numbers.shift)
            outside = max(0, gone.shape[-1] - numbers.window - 1)
            counts.append(gone.shape[-1] - gone[..., :outside].sum(-1))
        return torch.stack([count.to(counts[0].device) for count in counts])
