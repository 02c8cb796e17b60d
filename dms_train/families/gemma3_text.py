"""Gemma 3, the language model: five layers with a sliding window before each one without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import LayerAttention, LayerKeys, ModelFamily, Refusal
from dms_train.families.decoder.layer_types import FULL, SLIDING, periodic_kinds, refuse_period
from dms_train.families.decoder.windows import local_base, refuse_local_rope, refuse_sliding

# Defaults of transformers' Gemma3TextConfig.
_WINDOW, _LOCAL_BASE = 4096, 10000.0
_PERIOD = "sliding_window_pattern", 6


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `sliding_window_pattern`."""
    return periodic_kinds(config, config.get(*_PERIOD))


def _base(config: Mapping[str, Any]) -> Any:
    """Return the RoPE base of the layers with a window, by the keys of transformers 4 or 5."""
    return local_base(config, config.get("rope_local_base_freq", _LOCAL_BASE))


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows and RoPE that `_read` cannot read, and models without a global layer."""
    refusal = refuse_period(config, *_PERIOD)
    if refusal is not None:
        return refusal
    window, older = config.get("sliding_window", _WINDOW), config.get("rope_local_base_freq")
    refusal = refuse_sliding(config, _kinds(config), window)
    if refusal is None:
        default = _LOCAL_BASE if older is None else older
        refusal = refuse_local_rope(config, "rope_local_base_freq", default)
    if refusal is None and older not in (None, _base(config)):
        fix = f"rope_parameters says {_base(config)}; make them agree"
        return Refusal("rope_local_base_freq", older, fix)
    return refusal


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    window = config.get("sliding_window", _WINDOW)
    local = LayerAttention(rotary_base=float(_base(config)), window=window)
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
