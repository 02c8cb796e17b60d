"""Configurations of models retrofitted with Dynamic Memory Sparsification (DMS).

This file is shipped with the weights and needs only transformers (4.57 or later).
`configuration_<family>_dms.py` defines the class of the model family. Two layouts of config.json
are read: one nested `dms` key with `model_type: dms_<family>`, or flat `dms_*` keys with the
family's own model_type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DMSConfig", "DMSNumbers", "dms_numbers"]

_NEVER = 2**62  # a window that is longer than any sequence
_Mixed: Any = object  # a mixin precedes a class of transformers, whose type is not known here


@dataclass(frozen=True)
class DMSNumbers:
    """Constants of the attention layers.

    Attributes:
        channel: Eviction channel, in the first query head of each group (0 first, -1 last).
        scale: Factor on the eviction channel.
        offset: Subtracted from the product; a token is evicted if the result is > 0.
        shift: Token j is governed by the decision made at position j + shift.
        window: Token j stays visible to query i while i - j <= window.
        clear_after_rope: Whether the eviction channel is cleared again after RoPE.
    """

    channel: int
    scale: float
    offset: float
    shift: int
    window: int
    clear_after_rope: bool


def _from_nested(stated: dict[str, Any]) -> DMSNumbers:
    spec = stated["spec"]
    delay = spec["window"] if spec["eviction"] == "immediate" else 0
    return DMSNumbers(
        # of this file's weights, where the training had the channels of a head in another order
        channel=stated.get("file_channel", spec["channel"]),
        scale=spec["alpha_scale"],
        offset=spec["alpha_offset"],
        shift=spec["decision_shift"] + delay,
        window=spec["window"],
        clear_after_rope=spec["clear_after_rope"],
    )


def _from_flat(config: Any) -> DMSNumbers:
    if getattr(config, "dms_separate_alpha", False):
        raise ValueError(
            "dms_separate_alpha: a separate decision projection is not supported by this code"
        )
    if getattr(config, "dms_alpha_per", "head") != "head":
        raise ValueError("dms_alpha_per: only `head` is supported by this code")
    shift = getattr(config, "dms_decision_shift", 1)
    disabled = getattr(config, "dms_disable_eviction", False)
    return DMSNumbers(
        channel=-1,
        scale=getattr(config, "dms_alpha_scale", 100.0),
        offset=getattr(config, "dms_initial_alpha_offset", 5.0),
        shift=shift,
        window=_NEVER if disabled else config.dms_window_size,
        # The flat layout has no key for this: shift 0 is FastDMS, which clears once.
        clear_after_rope=shift == 1,
    )


def dms_numbers(config: Any) -> DMSNumbers:
    """Read the constants from either layout; ValueError if the config describes no DMS model."""
    nested = getattr(config, "dms", None)
    if nested is not None:
        return _from_nested(nested)
    if hasattr(config, "dms_window_size"):
        return _from_flat(config)
    raise ValueError("config.json has neither a `dms` key nor `dms_window_size`: not a DMS model")


def _with_rope_scaling(values: dict[str, Any]) -> dict[str, Any]:
    """Add `rope_scaling` to the values of a config.json, because transformers 4 needs that key.

    Exports state the rule in `rope_parameters` alone: with both keys, AutoTokenizer of
    transformers 5 warns, or cannot read their config.json without this code.
    """
    stated = values.get("rope_parameters") or {}
    if not stated or values.get("rope_scaling") is not None:
        return values
    stated = stated.get("full_attention", stated)  # Gemma 3 states a rule for each type of layer
    rule = {k: v for k, v in stated.items() if k != "rope_theta"}
    is_default = rule.get("rope_type", "default") == "default"
    return {**values, "rope_scaling": None if is_default else rule}


class DMSConfig(_Mixed):
    """Mixin for the configuration class of a family; writes the layout that it read."""

    # Accepted by `from_pretrained` because other loaders of the flat layout take them; they
    # choose kernels and buffers there and have no effect here.
    dms_chunked_prefill = None
    dms_compile_limit = 72
    dms_manual_inference_mode = False
    dms_preallocate_for_tokens = 4096

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_rope_scaling(kwargs))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read as transformers does; the family's model type counts as this class's own."""
        values, rest = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.model_type.removeprefix("dms_"):
            values["model_type"] = cls.model_type
        return values, rest

    def to_dict(self) -> dict[str, Any]:
        """Convert as transformers does; the flat layout keeps the family's model type."""
        values = super().to_dict()
        if getattr(self, "dms", None) is None:
            values["model_type"] = type(self).model_type.removeprefix("dms_")
        return values
