"""Gemma 3, the language model: five layers with a sliding window before each one without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dms_train.families.base import (
    FULL,
    SLIDING,
    LayerAttention,
    LayerKeys,
    ModelFamily,
    Refusal,
    local_only,
    refuse_kinds,
)

# Defaults of transformers' Gemma3TextConfig.
_PERIOD, _WINDOW, _LOCAL_BASE = 6, 4096, 10000.0


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `sliding_window_pattern`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    period = config.get("sliding_window_pattern", _PERIOD)
    layers = range(1, config["num_hidden_layers"] + 1)
    return [SLIDING if layer % period else FULL for layer in layers]


def _local_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE of the layers with a window, with the keys of transformers 4 below those of 5."""
    stated = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    return {"rope_theta": config.get("rope_local_base_freq", _LOCAL_BASE), **stated}


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows and RoPE that `_read` cannot read, and models without a global layer."""
    period = config.get("sliding_window_pattern", _PERIOD)
    if type(period) is not int or period < 1:
        return Refusal("sliding_window_pattern", period, "state a whole number above 0")
    kinds, layers = _kinds(config), config["num_hidden_layers"]
    refusal = refuse_kinds(kinds, (SLIDING, FULL), layers)
    if refusal is not None:
        return refusal
    if FULL not in kinds:
        return local_only(kinds)
    window = config.get("sliding_window", _WINDOW)
    if SLIDING in kinds and (type(window) is not int or window < 1):
        return Refusal("sliding_window", window, "state a whole number above 0")
    return _refuse_local_rope(config)


def _refuse_local_rope(config: Mapping[str, Any]) -> Refusal | None:
    block: Any = config
    for key in ("rope_parameters", SLIDING):
        block = block.get(key) or {}
        if not isinstance(block, Mapping):
            return Refusal(key, block, "state a JSON object or null")
    rope = _local_rope(config)
    base, older = rope["rope_theta"], config.get("rope_local_base_freq")
    if type(base) not in (int, float) or not 0 < base < math.inf:
        return Refusal("rope_local_base_freq", base, "state a number above 0")
    if older not in (None, base):
        fix = f"rope_parameters says {base}; make them agree"
        return Refusal("rope_local_base_freq", older, fix)
    for key, only in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
        if rope.get(key, only) != only:
            return Refusal(key, rope[key], f"use a model with {only} in {SLIDING} layers")
    return None


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    local_base = float(_local_rope(config)["rope_theta"])
    local = LayerAttention(rotary_base=local_base, window=config.get("sliding_window", _WINDOW))
    full = LayerAttention(rotary_base=base)
    return tuple(local if kind == SLIDING else full for kind in _kinds(config))


def _write(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers]
    }
    local = next((layer for layer in layers if layer.window is not None), None)
    if local is not None:
        keys |= {"sliding_window": local.window, "rope_local_base_freq": local.rotary_base}
    return keys


FAMILY = ModelFamily(
    name="gemma3_text",
    classes="Gemma3",
    package="gemma3",
    config_classes="Gemma3Text",
    qk_norm=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    sandwich_norms=True,
    centered_norms=True,
    scaled_embeddings=True,
    has_query_scalar=True,
    tied_by_default=True,
    head_size=256,
    rotary_base=1000000.0,
    rope_types=("linear",),
    layers=LayerKeys(_read, _write, has_windows=True, has_local_base=True),
    fixed={
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    refuse=_refuse,
)
