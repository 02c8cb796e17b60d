"""Types of layers in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import Refusal

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Types of layers in `layer_types` of config.json."""


def periodic_kinds(config: Mapping[str, Any], period: int, other: str = SLIDING) -> Any:
    """Return `layer_types`; by default every `period`-th layer is full, the rest `other`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    layers = range(1, config["num_hidden_layers"] + 1)
    return [other if layer % period else FULL for layer in layers]


def refuse_period(config: Mapping[str, Any], key: str, default: int) -> Refusal | None:
    """Refuse a period of layers that is not a whole number above 0."""
    period = config.get(key, default)
    if type(period) is not int or period < 1:
        return Refusal(key, period, "state a whole number above 0")
    return None


def refuse_kinds(kinds: Any, known: tuple[str, ...], layers: int) -> Refusal | None:
    """Refuse `layer_types` that are not one of the known types for each of `layers` layers."""
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        return Refusal("layer_types", kinds, f"state {' or '.join(known)} for every layer")
    if len(kinds) != layers:
        return Refusal("layer_types", kinds, f"state one type for each of {layers} layers")
    return None
