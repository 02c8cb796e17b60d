"""Architecture of a decoder in Megatron's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from dms_train.families import FAMILIES, LayerAttention, ModelFamily
from dms_train.hf.errors import HFError
from dms_train.hf.experts import Experts
from dms_train.hf.linear_attention import LinearAttention
from dms_train.hf.model_type import family_of
from dms_train.hf.rope import Rope, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Llama-like decoder.

    Attributes:
        family: A name in `dms_train.families`.
        kv_channels: Head size d.
        num_query_groups: KV heads.
        experts: Mixture of experts; None if every layer has one MLP of `ffn_hidden_size`.
        rope_scaling: Rule for RoPE, except in layers with a window if their RoPE is their own.
        layers: Attention of every layer; empty if all have RoPE with `rotary_base`.
        query_scalar: The softmax scale is its power of -1/2; None for the head size.
        partial_rotary_factor: Share of the channels of a head that RoPE rotates.
        linear: Sizes of the layers with linear attention; None if no layer has it.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    layernorm_epsilon: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None
    layers: tuple[LayerAttention, ...] = ()
    query_scalar: int | None = None
    partial_rotary_factor: float = 1.0
    linear: LinearAttention | None = None

    @property
    def rotary_channels(self) -> int:
        """Number of channels of a head that RoPE rotates."""
        return int(self.kv_channels * self.partial_rotary_factor)

    @property
    def rotates_pairs(self) -> bool:
        """True if RoPE rotates an even number of the channels of a head."""
        return 0 < self.rotary_channels <= self.kv_channels and self.rotary_channels % 2 == 0

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer, 0 without a mixture of experts."""
        return 0 if self.experts is None else self.experts.count

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        """Attention of every layer, also where all are alike."""
        return self.layers or (LayerAttention(rotary_base=self.rotary_base),) * self.num_layers

    @property
    def method_layers(self) -> list[int]:
        """Numbers of the layers on which a retrofit method acts: not linear, without a window."""
        layers = enumerate(self.attention_layers)
        return [n for n, layer in layers if layer.window is None and not layer.linear]

    @property
    def cache_layers(self) -> list[int]:
        """Numbers of the layers that hold keys and values: those without linear attention."""
        return [n for n, layer in enumerate(self.attention_layers) if not layer.linear]

    @property
    def ropes(self) -> list[Rope]:
        """RoPE of every layer."""
        keys = self.described.layers
        own = keys is not None and keys.has_local_base
        return [
            Rope(layer.rotary_base)
            if layer.rotary_base is None or (own and layer.window is not None)
            else Rope(layer.rotary_base, self.rope_scaling)
            for layer in self.attention_layers
        ]

    @property
    def described(self) -> ModelFamily:
        """Description of the family."""
        return FAMILIES[self.family]

    @property
    def softmax_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return float((self.query_scalar or self.kv_channels) ** -0.5)

    @property
    def add_qkv_bias(self) -> bool:
        """True if the q, k and v projections have a bias."""
        return self.described.qkv_bias

    @property
    def qk_layernorm(self) -> bool:
        """True if q and k are normalised before RoPE."""
        return self.described.qk_norm

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every size that no model can have."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                yield f"{path}.{item.name}={value}: use a number above 0"
        heads, groups = self.num_attention_heads, self.num_query_groups
        if groups > 0 and heads % groups:
            yield (
                f"{path}.num_query_groups={groups}: does not divide num_attention_heads={heads}; "
                "use a divisor of it"
            )
        yield from self._check_layers(path)
        yield from self._check_linear(path)
        if self.kv_channels % 2:
            yield f"{path}.kv_channels={self.kv_channels}: use an even head size"
        try:
            family_of({"model_type": self.family})
        except HFError as error:
            yield f"{path}.family={self.family}: {str(error).rpartition('; ')[2]}"
        else:
            yield from self._check_experts(path)
            yield from self._check_family(path)

    def _check_family(self, path: str) -> Iterator[str]:
        family, rule = FAMILIES[self.family], self.rope_scaling
        if rule is not None and rule.rope_type not in family.rope_types:
            known = ", ".join(family.rope_types) or "none"
            yield (
                f"{path}.rope_scaling.rope_type={rule.rope_type}: RoPE scaling of "
                f"{self.family} models is {known}; change it or set rope_scaling to null"
            )
        if self.query_scalar is not None and not family.has_query_scalar:
            yield (
                f"{path}.query_scalar={self.query_scalar}: {self.family} models scale by the head "
                "size; set it to null"
            )
        if self.partial_rotary_factor != 1 and family.rotary_factor is None:
            yield (
                f"{path}.partial_rotary_factor={self.partial_rotary_factor}: RoPE of {self.family} "
                "models rotates whole heads; set it to 1"
            )
        elif not self.rotates_pairs:
            yield (
                f"{path}.partial_rotary_factor={self.partial_rotary_factor}: rotates "
                f"{self.rotary_channels} of {self.kv_channels} channels; rotate an even number "
                "of them, at most all"
            )

    def _check_experts(self, path: str) -> Iterator[str]:
        experts = self.experts
        if FAMILIES[self.family].has_experts != (experts is not None):
            fix = "state them" if experts is None else "set it to null"
            yield f"{path}.experts: does not fit family={self.family}; {fix}"
        if experts is not None and not 0 < experts.topk <= experts.count:
            yield f"{path}.experts.topk={experts.topk}: use 1 to count={experts.count}"
        if experts is not None and experts.topk == 1 and experts.normalize:
            yield (
                f"{path}.experts.topk=1: the router has no effect on training with "
                "normalize=true; use normalize=false or a larger topk"
            )
        if experts is not None and experts.ffn_hidden_size <= 0:
            yield f"{path}.experts.ffn_hidden_size={experts.ffn_hidden_size}: use a number above 0"
        keys = FAMILIES[self.family].expert_keys
        if experts is None or keys is None:
            return
        if (experts.shared_ffn_hidden_size > 0) != (keys.shared is not None):
            fix = "use 0" if keys.shared is None else "use a number above 0"
            shared = experts.shared_ffn_hidden_size
            yield f"{path}.experts.shared_ffn_hidden_size={shared}: {fix} with {self.family} models"
        if keys.width == "intermediate_size" and experts.ffn_hidden_size != self.ffn_hidden_size:
            yield (
                f"{path}.experts.ffn_hidden_size={experts.ffn_hidden_size}: use "
                f"ffn_hidden_size={self.ffn_hidden_size}, which {self.family} models state once"
            )
        if keys.normalize is None and not experts.normalize:
            yield (
                f"{path}.experts.normalize=false: {self.family} models always normalise; set it to "
                "true"
            )

    def _check_layers(self, path: str) -> Iterator[str]:
        if not self.layers:
            return
        if len(self.layers) != self.num_layers:
            yield (
                f"{path}.layers: describes {len(self.layers)} layers, num_layers="
                f"{self.num_layers}; describe every layer, or none if all are alike"
            )
        keys = FAMILIES[self.family].layers if self.family in FAMILIES else None
        if keys is None:
            yield f"{path}.layers: the layers of {self.family} models are alike; leave it empty"
        windows = {layer.window for layer in self.layers if layer.window is not None}
        if windows and keys is not None and not keys.has_windows:
            yield f"{path}.layers: {self.family} models have no windows; leave out window"
        if len(windows) > 1 or min(windows, default=1) < 1:
            yield f"{path}.layers: windows {sorted(windows)}; use one window, of at least 1 token"
        elif not self.method_layers:
            yield f"{path}.layers: no layer reads all tokens; leave one without window and linear"
        if keys is not None and keys.has_local_base:
            yield from self._check_local_base(path)
            return
        for index, layer in enumerate(self.layers):
            if layer.rotary_base not in (None, self.rotary_base):
                yield (
                    f"{path}.layers[{index}].rotary_base={layer.rotary_base}: use null or "
                    f"rotary_base={self.rotary_base}"
                )

    def _check_linear(self, path: str) -> Iterator[str]:
        keys = FAMILIES[self.family].layers if self.family in FAMILIES else None
        known = keys is not None and keys.has_linear
        if known != (self.linear is not None):
            fix = "state it" if known else "set it to null"
            yield f"{path}.linear: does not fit family={self.family}; {fix}"
        for index, layer in enumerate(self.layers):
            if layer.linear and (not known or layer.rotary_base is not None or layer.window):
                fix = "leave out rotary_base and window" if known else "leave it out"
                yield f"{path}.layers[{index}].linear=true: {fix}"

    def _check_local_base(self, path: str) -> Iterator[str]:
        """Check a model whose layers with a window have a RoPE base of their own."""
        full = {layer.rotary_base for layer in self.layers if layer.window is None}
        if full - {self.rotary_base}:
            yield f"{path}.layers: use rotary_base={self.rotary_base} in layers without a window"
        local = {layer.rotary_base for layer in self.layers if layer.window is not None}
        if len(local) > 1 or None in local:
            yield f"{path}.layers: use one rotary_base in the layers with a window"
