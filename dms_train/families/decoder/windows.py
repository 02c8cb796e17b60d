"""Keys of config.json that describe layers with a sliding window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dms_train.families.base import LayerAttention, LayerKeys, Refusal
from dms_train.families.decoder.layer_types import FULL, SLIDING, refuse_kinds


def refuse_short_window(config: Mapping[str, Any], default: int | None = None) -> Refusal | None:
    """Refuse a window of all layers that is shorter than the longest sequence.

    Args:
        config: config.json.
        default: Window if config.json lacks `sliding_window`; None for full attention.
    """
    window = config.get("sliding_window", default)
    longest = config["max_position_embeddings"]
    if window is None or (type(window) is int and window >= longest):
        return None
    fix = "use a model with full attention (sliding_window=null)"
    return Refusal(
        "sliding_window", window, f"it is below max_position_embeddings={longest}; {fix}"
    )


def _local_only(kinds: list[str]) -> Refusal:
    """Refuse a model in which every layer has a window."""
    return Refusal("layer_types", kinds, "use a model with layers that read all tokens")


def refuse_sliding(config: Mapping[str, Any], kinds: Any, window: Any) -> Refusal | None:
    """Refuse types of layers and a window that no model has, and models without a global layer."""
    refusal = refuse_kinds(kinds, (SLIDING, FULL), config["num_hidden_layers"])
    if refusal is not None:
        return refusal
    if FULL not in kinds:
        return _local_only(kinds)
    if SLIDING in kinds and (type(window) is not int or window < 1):
        return Refusal("sliding_window", window, "state a whole number above 0")
    return None


def write_sliding(layers: tuple[LayerAttention, ...], *, default: int) -> dict[str, Any]:
    """Return the keys of layers with and without a window; `default` stands where none has one."""
    windows = [layer.window for layer in layers]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": max(filter(None, windows), default=default),
    }


def local_base(config: Mapping[str, Any], default: Any) -> Any:
    """Return the RoPE base of the layers with a window, which transformers 5 writes for them."""
    stated = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    return stated.get("rope_theta", default)


def refuse_local_rope(config: Mapping[str, Any], key: str, default: Any) -> Refusal | None:
    """Refuse RoPE of the layers with a window that is not plain RoPE with a base.

    Args:
        config: A config.json mapping.
        key: Key whose value is the base if `rope_parameters` states none.
        default: Its value.
    """
    block: Any = config
    for name in ("rope_parameters", SLIDING):
        block = block.get(name) or {}
        if not isinstance(block, Mapping):
            return Refusal(name, block, "state a JSON object or null")
    base = local_base(config, default)
    if type(base) not in (int, float) or not 0 < base < math.inf:
        return Refusal(key, base, "state a number above 0")
    for name, only in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
        if block.get(name, only) != only:
            return Refusal(name, block[name], f"use a model with {only} in {SLIDING} layers")
    return None


_WINDOW, _FULL_LAYERS = 4096, 28  # defaults of transformers in Qwen2 and Qwen3


def _layer_kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `max_window_layers`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    slides, full = config.get("use_sliding_window"), config.get("max_window_layers", _FULL_LAYERS)
    layers = range(config["num_hidden_layers"])
    return [SLIDING if slides and layer >= full else FULL for layer in layers]


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the window of `sliding_attention`; None if it holds the longest sequence."""
    window: int = config.get("sliding_window", _WINDOW)
    return window if window < config["max_position_embeddings"] else None


def refuse_windows(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows that `WINDOWED_LAYERS` cannot read, and models without a global layer."""
    slides, layers = config.get("use_sliding_window"), config["num_hidden_layers"]
    if slides is not None and type(slides) is not bool:
        return Refusal("use_sliding_window", slides, "state true or false")
    read = {"sliding_window": _WINDOW}
    if config.get("layer_types") is None:
        read["max_window_layers"] = _FULL_LAYERS
    for key, default in read.items():
        value = config.get(key, default)
        if slides and (type(value) is not int or value < 1):
            return Refusal(key, value, "state a whole number above 0")
    kinds = _layer_kinds(config)
    known = (SLIDING, FULL) if slides else (FULL,)
    refusal = refuse_kinds(kinds, known, layers)
    if refusal is None and FULL not in kinds and _window(config) is not None:
        return _local_only(kinds)
    return refusal


def _read_windows(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    return tuple(
        LayerAttention(rotary_base=base, window=_window(config) if kind == SLIDING else None)
        for kind in _layer_kinds(config)
    )


def _write_windows(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    windows = [layer.window for layer in layers]
    if not any(windows):
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": max(filter(None, windows)),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


WINDOWED_LAYERS = LayerKeys(_read_windows, _write_windows, has_windows=True)
"""Keys of Qwen2 and Qwen3: `use_sliding_window`, `sliding_window`, `layer_types`."""
