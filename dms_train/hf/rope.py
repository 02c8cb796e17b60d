"""RoPE of a model, and its keys in config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from dms_train.families import ModelFamily
from dms_train.families.decoder.layer_types import FULL
from dms_train.hf.values import Values
from dms_train.limits import OneOf

_SCALING_KEYS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "linear": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rule that scales the frequencies of RoPE.

    Attributes:
        factor: Divisor of the frequencies: of all with `linear`, of the low ones with `llama3` and
            `yarn`.
        low_freq_factor: Of `llama3`.
        high_freq_factor: Of `llama3`.
        original_max_position_embeddings: Of `llama3` and `yarn`.
        beta_fast: Turns within the original length above which `yarn` keeps a frequency.
        beta_slow: Turns below which `yarn` divides a frequency.
        attention_factor: Factor on rotated queries and keys, of `yarn`.
        truncate: Whether `yarn` rounds the numbers of the pairs between which it mixes frequencies.
        rope_type: Name of the rule in transformers, `llama3`, `yarn` or `linear`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rope_type: Annotated[str, OneOf("llama3", "yarn", "linear")] = "llama3"

    @staticmethod
    def completed(stored: Any) -> Any:
        """Return stored fields with those that earlier versions did not have."""
        return {**asdict(RopeScaling(factor=1.0)), **stored} if isinstance(stored, dict) else stored


class Rope(NamedTuple):
    """RoPE of a layer.

    Attributes:
        base: Base of the frequencies; None for a layer without RoPE.
        scaling: Rule that scales them, if any.
    """

    base: float | None
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor on rotated queries and keys."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def rope_base(config: Values, default: float) -> float:
    """Read the base from any key that a transformers version uses for it; null means absent."""
    stated_bases: dict[float, str] = {}
    for block in (config, config.block("rope_parameters"), config.block("rope_scaling")):
        if block.values.get("rope_theta") is not None:
            stated_bases.setdefault(block.positive("rope_theta"), block.where)
    if len(stated_bases) > 1:
        (base, _), (other, where) = list(stated_bases.items())[:2]
        raise config.refusal("rope_theta", base, f"{where} says {other}; make them agree")
    return next(iter(stated_bases), default)


def _rope_rule(config: Values) -> dict[str, Any]:
    """Read the scaling rule from the keys of transformers 4, 5 or both; `{}` for plain RoPE."""
    rules = []
    for key in ("rope_parameters", "rope_scaling"):
        stated = config.block(key).values
        rule = {k: v for k, v in stated.items() if k != "rope_theta"}
        kind = rule.pop("type", "default")
        kind = rule.setdefault("rope_type", kind)
        rule.pop("partial_rotary_factor", None)  # see `rotary_factor`
        if stated:
            rules.append({} if kind == "default" else rule)
    if len(rules) > 1 and rules[0] != rules[1]:
        fix = f"rope_parameters says {rules[0] or 'default'}; make them agree"
        raise config.refusal("rope_scaling", rules[1] or "default", fix)
    return rules[0] if rules else {}


def rotary_factor(config: Values, family: ModelFamily) -> float:
    """Read the share of rotated channels; config.json may state it in the rules of RoPE too."""
    key = "partial_rotary_factor"
    stated = {
        block.positive(key)
        for block in (config, config.block("rope_parameters"), config.block("rope_scaling"))
        if block.values.get(key) is not None
    } or {family.rotary_factor or 1.0}
    factor = stated.pop()
    if stated:
        raise config.refusal(key, factor, f"RoPE says {stated.pop()}; make them agree")
    if family.rotary_factor is None and factor != 1:
        raise config.refusal(key, factor, f"use a {family.name} model with full RoPE")
    return factor


def global_rope(config: Mapping[str, Any], family: ModelFamily) -> Mapping[str, Any]:
    """Return config.json with the RoPE of the layers without a window alone."""
    if family.layers is None or not family.layers.has_local_base:
        return config
    stated = Values("config.json", config).block("rope_parameters").block(FULL)
    return {**config, "rope_parameters": stated.values}


def rope_scaling(config: Values, family: ModelFamily) -> RopeScaling | None:
    """Read the rule that scales frequencies; None for plain RoPE."""
    rule = _rope_rule(config)
    if not rule:
        return None
    kind = rule["rope_type"]
    if kind not in family.rope_types:
        known = " or ".join(("default", *family.rope_types))
        raise config.refusal("rope_type", kind, f"use a {family.name} model with {known} RoPE")
    missing = [key for key in _SCALING_KEYS[kind] if key not in rule]
    if missing:
        fix = f"{kind} scaling also needs {', '.join(missing)}"
        raise config.refusal("rope_scaling", rule, fix)
    values = Values(f"config.json: {kind} RoPE scaling", rule)
    if kind == "linear":
        return RopeScaling(factor=values.positive("factor"), rope_type=kind)
    return _yarn(values) if kind == "yarn" else _llama3(values)


def _yarn(values: Values) -> RopeScaling:
    """Read the rule of YaRN with the defaults of transformers."""
    for key in ("mscale", "mscale_all_dim"):
        if values.values.get(key) is not None:
            raise values.refusal(key, values.values[key], f"use a model with {key}=None")
    rule = {key: value for key, value in values.values.items() if value is not None}
    stated, factor = Values(values.where, rule), values.positive("factor")
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=values.whole("original_max_position_embeddings"),
        beta_fast=stated.positive("beta_fast", 32.0),
        beta_slow=stated.positive("beta_slow", 1.0),
        attention_factor=stated.positive("attention_factor", 0.1 * math.log(max(factor, 1)) + 1),
        truncate=stated.flag("truncate", default=True),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        fix = f"state a number above beta_slow={scaling.beta_slow}"
        raise values.refusal("beta_fast", scaling.beta_fast, fix)
    return scaling


def _llama3(values: Values) -> RopeScaling:
    scaling = RopeScaling(
        factor=values.positive("factor"),
        low_freq_factor=values.positive("low_freq_factor"),
        high_freq_factor=values.positive("high_freq_factor"),
        original_max_position_embeddings=values.whole("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        fix = f"state a number above low_freq_factor={scaling.low_freq_factor}"
        raise values.refusal("high_freq_factor", scaling.high_freq_factor, fix)
    return scaling


def scaling_keys(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the keys of a rule in config.json, without the base; None for plain RoPE."""
    if scaling is None:
        return None
    values = asdict(scaling)
    kind = values["rope_type"]
    keys = _SCALING_KEYS[kind]
    if kind == "yarn":
        keys += ("beta_fast", "beta_slow", "attention_factor")
    if not scaling.truncate:
        keys += ("truncate",)
    return {"rope_type": kind, **{key: values[key] for key in keys}}
