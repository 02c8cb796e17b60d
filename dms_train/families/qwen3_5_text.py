"""Qwen3.5, the dense language models: linear attention in three of four layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import (
    FULL,
    LINEAR,
    LINEAR_PARTS,
    LayerAttention,
    LayerKeys,
    ModelFamily,
    Refusal,
    refuse_kinds,
)

_PERIOD = 4  # default of transformers' `full_attention_interval`


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `full_attention_interval`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    period = config.get("full_attention_interval", _PERIOD)
    layers = range(1, config["num_hidden_layers"] + 1)
    return [LINEAR if layer % period else FULL for layer in layers]


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse layers that `_read` cannot read, and models without a layer of full attention."""
    period = config.get("full_attention_interval", _PERIOD)
    if type(period) is not int or period < 1:
        return Refusal("full_attention_interval", period, "state a whole number above 0")
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


FAMILY = ModelFamily(
    name="qwen3_5_text",
    classes="Qwen3_5",
    package="qwen3_5",
    config_classes="Qwen3_5Text",
    qk_norm=True,
    output_gate=True,
    centered_norms=True,
    head_size=256,
    rotary_factor=0.25,
    stored={**LINEAR_PARTS, "self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")},
    stored_by_head=("self_attn.q_proj",),
    multimodal="qwen3_5",
    left_out=("model.visual.", "mtp."),
    layers=LayerKeys(_read, _write, has_linear=True),
    fixed={"attention_bias": False},
    refuse=_refuse,
)
