"""Architecture of a decoder in Megatron's terms, and its form in config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, NamedTuple

from dms_train.families import FAMILIES, LayerAttention, ModelFamily
from dms_train.families.base import ExpertKeys
from dms_train.families.decoder.layer_types import FULL, SLIDING
from dms_train.hf.errors import HFError
from dms_train.hf.typed import typed
from dms_train.hf.values import Values
from dms_train.limits import OneOf
from dms_train.method.spec import OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rule that scales the frequencies of RoPE.

    Attributes:
        factor: Divisor of the frequencies: of all with `linear`, of the low ones with `llama3` and
            `yarn`.
        low_freq_factor: Of `llama3`.
        high_freq_factor: Of `llama3`.
        original_max_position_embeddings: Of `llama3` and `yarn`.
        beta_fast: Turns within the original length above which `yarn` keeps a frequency.
        beta_slow: Turns below which `yarn` divides a frequency.
        attention_factor: Factor on rotated queries and keys, of `yarn`.
        truncate: Whether `yarn` rounds the numbers of the pairs between which it mixes frequencies.
        rope_type: Name of the rule in transformers, `llama3`, `yarn` or `linear`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rope_type: Annotated[str, OneOf("llama3", "yarn", "linear")] = "llama3"

    @staticmethod
    def completed(stored: Any) -> Any:
        """Return stored fields with those that earlier versions did not have."""
        return {**asdict(RopeScaling(factor=1.0)), **stored} if isinstance(stored, dict) else stored


class Rope(NamedTuple):
    """RoPE of a layer.

    Attributes:
        base: Base of the frequencies; None for a layer without RoPE.
        scaling: Rule that scales them, if any.
    """

    base: float | None
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor on rotated queries and keys."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts in place of the MLP of every layer.

    Attributes:
        count: Number of experts of a layer.
        topk: Number of experts that a token passes through.
        ffn_hidden_size: Width of an expert.
        normalize: Whether the weights of a token's experts are divided by their sum.
        shared_ffn_hidden_size: Width of an expert through which every token passes; 0 without.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    normalize: bool
    shared_ffn_hidden_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Sizes of the layers with linear attention (gated delta net, arXiv:2412.06464).

    Every key head serves the same number of value heads. A value head has a state of
    `key_channels` x `value_channels` numbers.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values.
        key_channels: Channels of a head of queries and keys.
        value_channels: Channels of a value head.
        taps: Tokens that the short convolution before the state reads.
    """

    key_heads: int
    value_heads: int
    key_channels: int
    value_channels: int
    taps: int

    @property
    def keys(self) -> int:
        """Number of channels of all heads of keys."""
        return self.key_heads * self.key_channels

    @property
    def values(self) -> int:
        """Number of channels of all value heads."""
        return self.value_heads * self.value_channels

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of queries, keys, values, output gate, rate and decay of one key head."""
        values = self.value_heads // self.key_heads
        wide = values * self.value_channels
        return (self.key_channels, self.key_channels, wide, wide, values, values)

    def check(self, path: str) -> Iterator[str]:
        """Yield one line for every size that no model can have."""
        for item in fields(self):
            if getattr(self, item.name) < 1:
                yield f"{path}.{item.name}={getattr(self, item.name)}: use a number above 0"
        if self.key_heads > 0 and self.value_heads % self.key_heads:
            yield (
                f"{path}.key_heads={self.key_heads}: does not divide value_heads="
                f"{self.value_heads}; use a divisor of it"
            )


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
        elif not _rotates_pairs(self):
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


def _rotates_pairs(a: Architecture) -> bool:
    """Return whether RoPE rotates an even number of the channels of a head."""
    return 0 < a.rotary_channels <= a.kv_channels and a.rotary_channels % 2 == 0


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Options that change the results of a model, with the implemented value of each. Quantisation tools
# use one of three keys (`quantization`: MLX).
_FIXED_EVERYWHERE = {
    "quantization_config": None,
    "compression_config": None,
    "quantization": None,
}
_SCALING_KEYS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "linear": ("factor",),
}
_UNREAD_MIXTURES = ("qwen3_5_moe", "qwen3_5_moe_text")
_METHOD_PREFIX = re.compile(f"({'|'.join(OPTIONS)})_")


def _config(config: Mapping[str, Any]) -> Values:
    return Values("config.json", config)


@typed
def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of a config.json mapping. Exports have a prefix in their model_type.

    Raises:
        ValueError: For any other model_type.
    """
    model_type = config.get("model_type")
    family = _METHOD_PREFIX.sub("", str(model_type), count=1)
    if family not in FAMILIES:
        fix = f"use one of {', '.join(FAMILIES)}"
        if family in _UNREAD_MIXTURES:
            fix = f"experts of Qwen3.5 are not implemented; {fix}"
        raise _config(config).refusal("model_type", model_type, fix)
    return family


def _is_mxfp4(quantization: Any) -> bool:
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _check_fixed(config: Values, family: ModelFamily) -> None:
    activation = {family.activation_key: family.activation}
    for key, only in {**_FIXED_EVERYWHERE, **activation, **family.fixed}.items():
        value = config.values.get(key, only)
        if family.stacked_experts and key == "quantization_config" and _is_mxfp4(value):
            continue
        if value != only and not (value is None and not only):
            needed = "null" if only is None else repr(only)
            raise config.refusal(key, value, f"use a {family.name} model with {key}={needed}")
    refusal = family.refuse(config.values) if family.refuse else None
    if refusal is not None:
        raise config.refusal(*refusal)
    kinds = config.values.get("layer_types")
    keys = family.layers
    states_kinds = keys is not None and (keys.has_windows or keys.has_linear)
    if (
        not states_kinds
        and kinds is not None
        and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds))
    ):
        fix = "use a model whose layers are all full_attention"
        raise config.refusal("layer_types", kinds, fix)


def _rope_base(config: Values, default: float) -> float:
    """Read the base from any key that a transformers version uses for it; null means absent."""
    stated_bases: dict[float, str] = {}
    for block in (config, config.block("rope_parameters"), config.block("rope_scaling")):
        if block.values.get("rope_theta") is not None:
            stated_bases.setdefault(block.positive("rope_theta"), block.where)
    if len(stated_bases) > 1:
        (base, _), (other, where) = list(stated_bases.items())[:2]
        raise config.refusal("rope_theta", base, f"{where} says {other}; make them agree")
    return next(iter(stated_bases), default)


def _rope_rule(config: Values) -> dict[str, Any]:
    """Read the scaling rule from the keys of transformers 4, 5 or both; `{}` for plain RoPE."""
    rules = []
    for key in ("rope_parameters", "rope_scaling"):
        stated = config.block(key).values
        rule = {k: v for k, v in stated.items() if k != "rope_theta"}
        kind = rule.pop("type", "default")
        kind = rule.setdefault("rope_type", kind)
        rule.pop("partial_rotary_factor", None)  # see `_rotary_factor`
        if stated:
            rules.append({} if kind == "default" else rule)
    if len(rules) > 1 and rules[0] != rules[1]:
        fix = f"rope_parameters says {rules[0] or 'default'}; make them agree"
        raise config.refusal("rope_scaling", rules[1] or "default", fix)
    return rules[0] if rules else {}


def _rotary_factor(config: Values, family: ModelFamily) -> float:
    """Read the share of rotated channels; config.json may state it in the rules of RoPE too."""
    key = "partial_rotary_factor"
    stated = {
        block.positive(key)
        for block in (config, config.block("rope_parameters"), config.block("rope_scaling"))
        if block.values.get(key) is not None
    } or {family.rotary_factor or 1.0}
    factor = stated.pop()
    if stated:
        raise config.refusal(key, factor, f"RoPE says {stated.pop()}; make them agree")
    if family.rotary_factor is None and factor != 1:
        raise config.refusal(key, factor, f"use a {family.name} model with full RoPE")
    return factor


def _global_rope(config: Mapping[str, Any], family: ModelFamily) -> Mapping[str, Any]:
    """Return config.json with the RoPE of the layers without a window alone."""
    if family.layers is None or not family.layers.has_local_base:
        return config
    stated = _config(config).block("rope_parameters").block(FULL)
    return {**config, "rope_parameters": stated.values}


def _query_scalar(config: Values, family: ModelFamily, head_size: int) -> int | None:
    """Read the number whose root divides scores; None if it is the head size."""
    if not family.has_query_scalar:
        return None
    scalar = config.whole("query_pre_attn_scalar", 256)
    return None if scalar == head_size else scalar


def _rope_scaling(config: Values, family: ModelFamily) -> RopeScaling | None:
    rule = _rope_rule(config)
    if not rule:
        return None
    kind = rule["rope_type"]
    if kind not in family.rope_types:
        known = " or ".join(("default", *family.rope_types))
        raise config.refusal("rope_type", kind, f"use a {family.name} model with {known} RoPE")
    missing = [key for key in _SCALING_KEYS[kind] if key not in rule]
    if missing:
        fix = f"{kind} scaling also needs {', '.join(missing)}"
        raise config.refusal("rope_scaling", rule, fix)
    values = Values(f"config.json: {kind} RoPE scaling", rule)
    if kind == "linear":
        return RopeScaling(factor=values.positive("factor"), rope_type=kind)
    return _yarn(values) if kind == "yarn" else _llama3(values)


def _yarn(values: Values) -> RopeScaling:
    """Read the rule of YaRN with the defaults of transformers."""
    for key in ("mscale", "mscale_all_dim"):
        if values.values.get(key) is not None:
            raise values.refusal(key, values.values[key], f"use a model with {key}=None")
    rule = {key: value for key, value in values.values.items() if value is not None}
    stated, factor = Values(values.where, rule), values.positive("factor")
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=values.whole("original_max_position_embeddings"),
        beta_fast=stated.positive("beta_fast", 32.0),
        beta_slow=stated.positive("beta_slow", 1.0),
        attention_factor=stated.positive("attention_factor", 0.1 * math.log(max(factor, 1)) + 1),
        truncate=stated.flag("truncate", default=True),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        fix = f"state a number above beta_slow={scaling.beta_slow}"
        raise values.refusal("beta_fast", scaling.beta_fast, fix)
    return scaling


def _llama3(values: Values) -> RopeScaling:
    scaling = RopeScaling(
        factor=values.positive("factor"),
        low_freq_factor=values.positive("low_freq_factor"),
        high_freq_factor=values.positive("high_freq_factor"),
        original_max_position_embeddings=values.whole("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        fix = f"state a number above low_freq_factor={scaling.low_freq_factor}"
        raise values.refusal("high_freq_factor", scaling.high_freq_factor, fix)
    return scaling


def _optional_whole(config: Values, key: str, default: int) -> int:
    """Read a whole number that config.json may leave out or state as null."""
    return default if config.values.get(key) is None else config.whole(key)


def _kv_heads(config: Values, family: ModelFamily) -> int:
    if family.kv_heads_required and "num_key_value_heads" not in config.values:
        raise HFError("config.json: num_key_value_heads is missing; state it")
    return _optional_whole(config, "num_key_value_heads", config.whole("num_attention_heads"))


def _head_size(config: Values, family: ModelFamily) -> int:
    if family.head_size is not None and "head_dim" not in config.values:
        return family.head_size
    share = config.whole("hidden_size") // config.whole("num_attention_heads")
    return _optional_whole(config, "head_dim", share)


def _experts(config: Values, family: ModelFamily) -> Experts | None:
    """Read the mixture of experts; transformers 5 writes the number of experts under a new key."""
    keys = family.expert_keys
    if keys is None:
        return None
    new = "num_local_experts" in config.values
    experts = Experts(
        count=config.whole("num_local_experts" if new else keys.number, keys.experts),
        topk=config.whole("num_experts_per_tok", keys.topk),
        ffn_hidden_size=config.whole(keys.width, keys.expert_width),
        normalize=keys.normalize is None or config.flag(keys.normalize, default=keys.normalizes),
        shared_ffn_hidden_size=config.whole(keys.shared, keys.expert_width) if keys.shared else 0,
    )
    if experts.topk > experts.count:
        fix = f"state at most the number of experts, {experts.count}"
        raise config.refusal("num_experts_per_tok", experts.topk, fix)
    if experts.topk == 1 and experts.normalize:
        fix = "the router has no effect on training with normalised weights; use another model"
        raise config.refusal("num_experts_per_tok", 1, fix)
    return experts


_LINEAR_KEYS = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_channels": ("linear_key_head_dim", 128),
    "value_channels": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}


def _linear(config: Values, family: ModelFamily) -> LinearAttention | None:
    """Read the sizes of linear attention with the defaults of transformers."""
    if family.layers is None or not family.layers.has_linear:
        return None
    sizes = {name: config.whole(key, default) for name, (key, default) in _LINEAR_KEYS.items()}
    linear = LinearAttention(**sizes)
    if linear.value_heads % linear.key_heads:
        fix = f"state a divisor of linear_num_value_heads={linear.value_heads}"
        raise config.refusal("linear_num_key_heads", linear.key_heads, fix)
    return linear


def _expert_keys(experts: Experts, keys: ExpertKeys) -> dict[str, Any]:
    return {
        keys.number: experts.count,
        "num_experts_per_tok": experts.topk,
        keys.width: experts.ffn_hidden_size,
        **({} if keys.normalize is None else {keys.normalize: experts.normalize}),
        **({} if keys.shared is None else {keys.shared: experts.shared_ffn_hidden_size}),
    }


def _distinct(layers: tuple[LayerAttention, ...], base: float) -> tuple[LayerAttention, ...]:
    """Return the layers, or nothing if all are as in a model without a specification."""
    return () if set(layers) == {LayerAttention(rotary_base=base)} else layers


def _check_heads(architecture: Architecture) -> None:
    """Refuse head counts and sizes that no attention layer can have."""
    a = architecture
    if a.num_attention_heads % a.num_query_groups:
        raise HFError(
            f"config.json: num_key_value_heads={a.num_query_groups} does not divide "
            f"num_attention_heads={a.num_attention_heads}; correct one of them"
        )
    if a.kv_channels < 2 or a.kv_channels % 2:
        raise HFError(f"config.json: the head size is {a.kv_channels}; state an even head_dim")
    if not _rotates_pairs(a):
        raise HFError(
            f"config.json: partial_rotary_factor={a.partial_rotary_factor} rotates "
            f"{a.rotary_channels} of {a.kv_channels} channels; state a share that gives an even "
            "number, at most all"
        )


@typed
def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Read a config.json mapping, in the spelling of transformers 4 or 5.

    Args:
        config: Parsed config.json of a model of a known family or of an export of one.

    Returns:
        The architecture. Keys that are absent take transformers' defaults.

    Raises:
        ValueError: One line naming the key that is missing, mistyped or not supported.
    """
    family = FAMILIES[family_of(config)]
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise HFError(f"config.json: missing keys {', '.join(missing)}; state them")
    values = _config(_global_rope(config, family))
    sizes = {key: values.whole(key) for key in _REQUIRED}
    _check_fixed(_config(config), family)
    base, head_size = _rope_base(values, family.rotary_base), _head_size(values, family)
    architecture = Architecture(
        family=family.name,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=_kv_heads(values, family),
        kv_channels=head_size,
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
        rotary_base=base,
        layernorm_epsilon=values.positive("rms_norm_eps", family.norm_epsilon),
        tie_word_embeddings=values.flag("tie_word_embeddings", default=family.tied_by_default),
        rope_scaling=_rope_scaling(values, family),
        experts=_experts(values, family),
        layers=() if family.layers is None else _distinct(family.layers.read(config, base), base),
        query_scalar=_query_scalar(values, family, head_size),
        partial_rotary_factor=_rotary_factor(values, family),
        linear=_linear(values, family),
    )
    _check_heads(architecture)
    return architecture


def _rope_keys(architecture: Architecture) -> dict[str, Any]:
    """Spell RoPE for transformers 4 and 5; without its own key, version 4 takes base 10000."""
    scaling: dict[str, Any] | None = None
    if architecture.rope_scaling is not None:
        values = asdict(architecture.rope_scaling)
        kind = values["rope_type"]
        keys = _SCALING_KEYS[kind]
        if kind == "yarn":
            keys += ("beta_fast", "beta_slow", "attention_factor")
        scaling = {"rope_type": kind, **{key: values[key] for key in keys}}
        if not values["truncate"]:
            scaling["truncate"] = False
    base = architecture.rotary_base
    parameters = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    family, share = FAMILIES[architecture.family], {}
    if family.rotary_factor is not None:
        share = {"partial_rotary_factor": architecture.partial_rotary_factor}
    parameters |= share
    layers = family.layers
    if layers is not None and layers.has_local_base:
        parameters = {FULL: parameters}
        for layer in architecture.layers:
            if layer.window is not None:
                local = {"rope_theta": layer.rotary_base, "rope_type": "default"}
                parameters[SLIDING] = local
    return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": parameters, **share}


@typed
def to_hf_config(architecture: Architecture) -> dict[str, Any]:
    """Return the config.json mapping of a model, complete except dtype and special token ids.

    Inverse of `from_hf_config`; RoPE is spelled for transformers 4 and 5.
    """
    a, family = architecture, FAMILIES[architecture.family]
    config: dict[str, Any] = {
        "architectures": [family.causal_lm],
        "model_type": a.family,
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "rms_norm_eps": a.layernorm_epsilon,
        "tie_word_embeddings": a.tie_word_embeddings,
        family.activation_key: family.activation,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **family.fixed,
        **family.written,
        **_rope_keys(a),
        **({} if family.layers is None else family.layers.write(a.attention_layers)),
    }
    if family.always_has_head_dim or a.kv_channels * a.num_attention_heads != a.hidden_size:
        config["head_dim"] = a.kv_channels
    if a.experts is not None and family.expert_keys is not None:
        config |= _expert_keys(a.experts, family.expert_keys)
    if a.linear is not None:
        config |= {key: getattr(a.linear, name) for name, (key, _) in _LINEAR_KEYS.items()}
    if family.has_query_scalar:
        config["query_pre_attn_scalar"] = a.query_scalar or a.kv_channels
    return config
