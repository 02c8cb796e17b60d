"""gpt-oss: attention sinks, a sliding window in every second layer, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dms_train.families.base import (
    GATE_ALPHA,
    GATE_LIMIT,
    ExpertKeys,
    LayerAttention,
    LayerKeys,
    ModelFamily,
    Refusal,
)
from dms_train.families.decoder.layer_types import SLIDING, periodic_kinds
from dms_train.families.decoder.windows import refuse_sliding, write_sliding

# Defaults of transformers' GptOssConfig.
_PERIOD, _WINDOW = 2, 128


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or the types that transformers gives to the layers."""
    return periodic_kinds(config, _PERIOD)


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows that `_read` cannot read, and models without a global layer or RoPE."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        # without the keys transformers takes the YaRN of the published models
        return Refusal("rope_parameters", None, "state the RoPE of the model")
    return refuse_sliding(config, _kinds(config), config.get("sliding_window", _WINDOW))


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    local = LayerAttention(rotary_base=base, window=config.get("sliding_window", _WINDOW))
    full = LayerAttention(rotary_base=base)
    return tuple(local if kind == SLIDING else full for kind in _kinds(config))


FAMILY = ModelFamily(
    name="gpt_oss",
    classes="GptOss",
    qkv_bias=True,
    linear_bias=True,
    sinks=True,
    expert_keys=ExpertKeys("num_local_experts", "intermediate_size", None, topk=4),
    stacked_experts=True,
    clamped_gate=True,
    kv_heads_required=False,
    head_size=64,
    rotary_base=150000.0,
    norm_epsilon=1e-5,
    rope_types=("yarn",),
    stored={"mlp.router": ("mlp.gate",)},
    layers=LayerKeys(_read, partial(write_sliding, default=_WINDOW), has_windows=True),
    fixed={"attention_bias": True, "swiglu_alpha": GATE_ALPHA, "swiglu_limit": GATE_LIMIT},
    refuse=_refuse,
)
