"""config.json of a model: reading it into an architecture, and writing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dms_train.families import FAMILIES, LayerAttention, ModelFamily
from dms_train.families.decoder.layer_types import FULL, SLIDING
from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.experts import expert_keys, read_experts
from dms_train.hf.linear_attention import linear_keys, read_linear
from dms_train.hf.model_type import family_of
from dms_train.hf.rope import global_rope, rope_base, rope_scaling, rotary_factor, scaling_keys
from dms_train.hf.typed import typed
from dms_train.hf.values import Values

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
# Without a version, transformers 4.57.6 (also with a later one, below 5) and 5.17 take a tokenizer
# of more than 100,000 tokens for one of Mistral: they advise an option that changes its tokens.
_VERSION = "4.57.0"


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
        and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds))
    ):
        fix = "use a model whose layers are all full_attention"
        raise config.refusal("layer_types", kinds, fix)


def _query_scalar(config: Values, family: ModelFamily, head_size: int) -> int | None:
    """Read the number whose root divides scores; None if it is the head size."""
    if not family.has_query_scalar:
        return None
    scalar = config.whole("query_pre_attn_scalar", 256)
    return None if scalar == head_size else scalar


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
    if not a.rotates_pairs:
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
    values = Values("config.json", global_rope(config, family))
    sizes = {key: values.whole(key) for key in _REQUIRED}
    _check_fixed(Values("config.json", config), family)
    base, head_size = rope_base(values, family.rotary_base), _head_size(values, family)
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
        rope_scaling=rope_scaling(values, family),
        experts=read_experts(values, family),
        layers=() if family.layers is None else _distinct(family.layers.read(config, base), base),
        query_scalar=_query_scalar(values, family, head_size),
        partial_rotary_factor=rotary_factor(values, family),
        linear=read_linear(values, family),
    )
    _check_heads(architecture)
    return architecture


def _rope_keys(a: Architecture) -> dict[str, Any]:
    """Spell RoPE for transformers 4 and 5; without its own key, version 4 takes base 10000."""
    base, scaling, share = a.rotary_base, scaling_keys(a.rope_scaling), dict[str, Any]()
    if a.described.rotary_factor is not None:
        share = {"partial_rotary_factor": a.partial_rotary_factor}
    parameters = {"rope_theta": base, **(scaling or {"rope_type": "default"}), **share}
    layers = a.described.layers
    if layers is not None and layers.has_local_base:
        parameters = {FULL: parameters}
        for layer in a.layers:
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
        "transformers_version": _VERSION,
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
        config |= expert_keys(a.experts, family.expert_keys)
    if a.linear is not None:
        config |= linear_keys(a.linear)
    if family.has_query_scalar:
        config["query_pre_attn_scalar"] = a.query_scalar or a.kv_channels
    return config
