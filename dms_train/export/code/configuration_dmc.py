"""Configurations of models retrofitted with Dynamic Memory Compression (DMC).

This file is shipped with the weights and needs only transformers (4.57 or later). An export adds
the class of its family at the end. config.json has the constants under its key `dmc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_Mixed: Any = object  # stands for the class of transformers that a mixin precedes


@dataclass(frozen=True)
class DMCNumbers:
    """Constants of the attention layers.

    Attributes:
        channel: Borrowed channel of keys, which decides, and of queries, which weighs.
        scale: Factor on the borrowed activation of a key.
        offset: Subtracted from it; a token is merged with the one before it if the result is > 0.
        width: Newest tokens of a slot that its average is taken of.
        uniform: Whether all tokens weigh the same.
        weight_offset: Added to the borrowed activation of the queries.
        shared: Whether the first KV head decides for all.
    """

    channel: int
    scale: float
    offset: float
    width: int
    uniform: bool
    weight_offset: float
    shared: bool


def dmc_numbers(config: Any) -> DMCNumbers:
    """The constants of a config; ValueError if it describes no DMC model."""
    nested = getattr(config, "dmc", None)
    if nested is None:
        raise ValueError("config.json has no `dmc` key: not a DMC model")
    spec = nested["spec"]
    return DMCNumbers(
        channel=spec["channel"],
        scale=spec["alpha_scale"],
        offset=spec["alpha_offset"],
        width=spec["merge_window"],
        uniform=spec["importance"] == "uniform",
        weight_offset=spec["importance_offset"],
        shared=spec["heads"] == "shared",
    )


def _with_rope_scaling(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a config.json with `rope_scaling` for transformers 4, which needs that key.

    Exports state the rule in `rope_parameters` alone. With both keys AutoTokenizer of transformers
    5 cannot read their config.json without this code.
    """
    rule = {k: v for k, v in (values.get("rope_parameters") or {}).items() if k != "rope_theta"}
    if values.get("rope_scaling") is None and rule.get("rope_type", "default") != "default":
        return {**values, "rope_scaling": rule}
    return values


class _DMCConfigMixin(_Mixed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_rope_scaling(kwargs))


def config_with_dmc(base: type[Any]) -> type:
    """A family's configuration class with DMC.

    Args:
        base: A class of transformers such as `LlamaConfig`.

    Returns:
        `LlamaConfigDMC`, whose model_type is `dmc_llama`.
    """
    values = {"model_type": f"dmc_{base.model_type}", "__doc__": f"{base.__name__} with DMC."}
    return type(f"{base.__name__}DMC", (_DMCConfigMixin, base), values)
