"""Mistral with full attention: 7B v0.2 and later, Nemo."""

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import ModelFamily, Refusal

_DEFAULT_WINDOW = 4096  # default of transformers' MistralConfig where config.json has no such key


def _sliding_window(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse a window that is shorter than the longest sequence."""
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    longest = config["max_position_embeddings"]
    if window is None or (type(window) is int and window >= longest):
        return None
    fix = "use a model with full attention (sliding_window=null)"
    return Refusal(
        "sliding_window", window, f"it is below max_position_embeddings={longest}; {fix}"
    )


FAMILY = ModelFamily(
    name="mistral",
    classes="Mistral",
    written={"sliding_window": None},
    refuse=_sliding_window,
)
