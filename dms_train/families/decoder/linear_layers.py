"""Keys of config.json that describe layers with linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import LayerAttention, LayerKeys, Refusal
from dms_train.families.decoder.layer_types import (
    FULL,
    LINEAR,
    periodic_kinds,
    refuse_kinds,
    refuse_period,
)

_PERIOD = "full_attention_interval", 4  # key, and its default in transformers


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `full_attention_interval`."""
    return periodic_kinds(config, config.get(*_PERIOD), LINEAR)


def refuse_linear(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse layers that `LINEAR_LAYERS` cannot read, and models without full attention."""
    refusal = refuse_period(config, *_PERIOD)
    if refusal is not None:
        return refusal
    kinds = _kinds(config)
    refusal = refuse_kinds(kinds, (LINEAR, FULL), config["num_hidden_layers"])
    if refusal is None and FULL not in kinds:
        return Refusal("layer_types", kinds, "use a model with layers of full attention")
    return refusal


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    linear, full = LayerAttention(rotary_base=None, linear=True), LayerAttention(rotary_base=base)
    return tuple(linear if kind == LINEAR else full for kind in _kinds(config))


def _write(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    return {"layer_types": [LINEAR if layer.linear else FULL for layer in layers]}


LINEAR_LAYERS = LayerKeys(_read, _write, has_linear=True)
"""Keys of Qwen3-Next and Qwen3.5: `layer_types`, `full_attention_interval`."""
