"""OLMo 3: three layers with a sliding window before each one without, which alone has YaRN."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dms_train.families.base import LayerAttention, LayerKeys, ModelFamily, Refusal
from dms_train.families.decoder.layer_types import SLIDING, periodic_kinds
from dms_train.families.decoder.windows import (
    local_base,
    refuse_local_rope,
    refuse_sliding,
    write_sliding,
)

# Defaults of transformers' Olmo3Config.
_PERIOD, _WINDOW, _BASE = 4, 4096, 500000.0


def _kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or the types that transformers gives to the layers."""
    return periodic_kinds(config, _PERIOD)


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows and RoPE that `_read` cannot read, and models without a global layer."""
    refusal = refuse_sliding(config, _kinds(config), config.get("sliding_window", _WINDOW))
    if refusal is None:
        refusal = refuse_local_rope(config, "rope_theta", _BASE)
    base = config.get("rope_theta")
    if refusal is None and local_base(config, None) is None and base not in (None, _BASE):
        # transformers 4 takes this base in layers with a window, transformers 5 its default
        fix = f"state rope_theta of {SLIDING} in rope_parameters"
        return Refusal("rope_theta", base, fix)
    return refusal


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    window, own = config.get("sliding_window", _WINDOW), float(local_base(config, _BASE))
    local, full = LayerAttention(rotary_base=own, window=window), LayerAttention(rotary_base=base)
    return tuple(local if kind == SLIDING else full for kind in _kinds(config))


FAMILY = ModelFamily(
    name="olmo3",
    classes="Olmo3",
    qk_norm=True,
    joint_qk_norm=True,
    sandwich_norms=True,
    input_norms=False,
    kv_heads_required=False,
    always_has_head_dim=False,
    rotary_base=_BASE,
    norm_epsilon=1e-5,
    rope_types=("yarn",),
    layers=LayerKeys(
        _read, partial(write_sliding, default=_WINDOW), has_windows=True, has_local_base=True
    ),
    fixed={"attention_bias": False},
    # without the key transformers takes token 1, which other vocabularies use for text
    written={"pad_token_id": None},
    refuse=_refuse,
)
