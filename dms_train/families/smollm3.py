"""SmolLM3: no RoPE in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from dms_train.families.base import LayerAttention, LayerKeys, ModelFamily, Refusal
from dms_train.families.decoder.layer_types import refuse_period

_INTERVAL = "no_rope_layer_interval", 4  # key, and its default in transformers


def _rotated(config: Mapping[str, Any]) -> Any:
    """Return `no_rope_layers`: for every layer, 1 with RoPE and 0 without."""
    stated = config.get("no_rope_layers")
    if stated is not None:
        return stated
    interval = config.get(*_INTERVAL)
    return [int(layer % interval != 0) for layer in range(1, config["num_hidden_layers"] + 1)]


def _refuse(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse anything but a 0 or 1 for every layer."""
    refusal = refuse_period(config, *_INTERVAL)
    if refusal is not None:
        return refusal
    rotated, layers = _rotated(config), config["num_hidden_layers"]
    if not isinstance(rotated, list) or any(type(v) is not int or v not in (0, 1) for v in rotated):
        return Refusal("no_rope_layers", rotated, "state a list of 1 (RoPE) and 0 (none)")
    if len(rotated) < layers:
        return Refusal("no_rope_layers", rotated, f"state one number for each of {layers} layers")
    return None


def _read(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    rotated = _rotated(config)[: config["num_hidden_layers"]]
    return tuple(LayerAttention(rotary_base=base if turns else None) for turns in rotated)


def _write(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer.rotary_base is not None) for layer in layers]}


FAMILY = ModelFamily(
    name="smollm3",
    classes="SmolLM3",
    tied_by_default=True,
    always_has_head_dim=False,
    rotary_base=2000000.0,
    layers=LayerKeys(_read, _write),
    fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    # without the key transformers takes token 128004, which small vocabularies do not have
    written={"sliding_window": None, "pad_token_id": None},
    refuse=_refuse,
)
