"""Configurations of models retrofitted with Dynamic Memory Compression (DMC).

This file is shipped with the weights and needs only transformers (4.57 or later).
`configuration_<family>_dmc.py` defines the class of the model family. config.json holds the
constants under its key `dmc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DMCConfig", "DMCNumbers", "dmc_numbers"]

_Mixed: Any = object  # a mixin precedes a class of transformers, whose type is not known here


@dataclass(frozen=True)
class DMCNumbers:
    """Constants of the attention layers.

    Attributes:
        channel: Eviction channel. In keys it decides; in queries it sets the weight of a token.
        scale: Factor on the eviction channel of a key.
        offset: Subtracted from the product; a token is merged with the one before it if the
            result is > 0.
        width: Number of tokens that a slot averages, the newest ones.
        uniform: Whether all tokens have the same weight.
        weight_offset: Added to the eviction channel of the queries.
        shared: Whether the first KV head decides for all KV heads.
    """

    channel: int
    scale: float
    offset: float
    width: int
    uniform: bool
    weight_offset: float
    shared: bool


def dmc_numbers(config: Any) -> DMCNumbers:
    """Read the constants of a config; ValueError if it describes no DMC model."""
    nested = getattr(config, "dmc", None)
    if nested is None:
        raise ValueError("config.json has no `dmc` key: not a DMC model")
    spec = nested["spec"]
    return DMCNumbers(
        # of this file's weights, where the training had the channels of a head in another order
        channel=nested.get("file_channel", spec["channel"]),
        scale=spec["alpha_scale"],
        offset=spec["alpha_offset"],
        width=spec["merge_window"],
        uniform=spec["importance"] == "uniform",
        weight_offset=spec["importance_offset"],
        shared=spec["heads"] == "shared",
    )


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


class DMCConfig(_Mixed):
    """Mixin for the configuration class of a family."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_rope_scaling(kwargs))
