"""Layout of `nvidia` and `fastdms`: flat `dms_*` keys in config.json, and dms_metadata.json.

Both consumers support only some specifications. Neither layout records the eviction channel of a
checkpoint, so everything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.hf.config_json import from_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.formats.base import ExportedModel, Stated, read_spec_values
from dms_train.hf.json_files import read_json
from dms_train.hf.values import Values
from dms_train.method.base import MethodSpec
from dms_train.method.dms.spec import DMSSpec

METADATA_FILE = "dms_metadata.json"
DTYPE = "bfloat16"
DECISION_SOURCE = "borrowed_query_last_channel"
_KEYS = ("dms_window_size", "dms_alpha_scale", "dms_initial_alpha_offset", "dms_cr")
_SWITCHES = {"dms_separate_alpha": False, "dms_alpha_per": "head", "dms_disable_eviction": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a program that reads the flat layout.

    Attributes:
        families: Model families with DMS code.
        decision_shift: The only supported shift.
        clear_after_rope: Whether the program clears the eviction channel again after RoPE.
        max_group: Maximum number of query heads per KV head in its kernels.
        max_head_size: Maximum head size in its kernels.
    """

    families: tuple[str, ...]
    decision_shift: int
    clear_after_rope: bool
    max_group: int | None = None
    max_head_size: int | None = None

    def problem(self, model: ExportedModel) -> str | None:
        """Return the first reason why the weights would be misread, or None."""
        if model.architecture.family not in self.families:
            known = ", ".join(self.families)
            return f"family {model.architecture.family}: it has DMS code for {known} only"
        return self._method_problem(model.spec) or self._model_problem(model)

    def _method_problem(self, spec: MethodSpec) -> str | None:
        if not isinstance(spec, DMSSpec):
            return f"method={spec.preset}: it holds models trained for dms only"
        if spec.channel != -1:
            return f"method.channel={spec.channel}: it reads the last channel; train with -1"
        if spec.decision_shift != self.decision_shift:
            return (
                f"method.decision_shift={spec.decision_shift}: it evicts with shift "
                f"{self.decision_shift}, and weights cannot be converted"
            )
        if spec.eviction != "delayed":
            return f"method.eviction={spec.eviction}: it supports only delayed eviction"
        if spec.clear_after_rope != self.clear_after_rope:
            does = "clears" if self.clear_after_rope else "does not clear"
            return (
                f"method.clear_after_rope={spec.clear_after_rope}: it {does} the channel after RoPE"
            )
        return None

    def _model_problem(self, model: ExportedModel) -> str | None:
        a = model.architecture
        if len(a.method_layers) < a.num_layers:
            return "sliding-window layers: it evicts in all layers"
        if a.family == "qwen3" and a.rope_scaling is not None:
            return "rope_scaling on qwen3: it is ignored"
        group = a.num_attention_heads // a.num_query_groups
        if self.max_group is not None and group > self.max_group:
            return f"{group} query heads per KV head: its kernels take up to {self.max_group}"
        if self.max_head_size is not None and a.kv_channels > self.max_head_size:
            return f"head size {a.kv_channels}: its kernels take up to {self.max_head_size}"
        if model.dtype != DTYPE:
            return f"dtype {model.dtype}: export {DTYPE}"
        return None


def rounding_advice(model: ExportedModel) -> list[str]:
    """Return a remark if the compression ratio is rounded."""
    cr = model.target_cr
    return [] if cr == int(cr) else [f"dms_cr is an integer: {cr} is written as {int(cr)}"]


def _spec(model: ExportedModel) -> DMSSpec:
    """Return the spec of a model that `Limits.problem` accepts."""
    assert isinstance(model.spec, DMSSpec)
    return model.spec


def config_keys(model: ExportedModel) -> dict[str, Any]:
    """Return the flat keys; `model_type` remains the one of the family."""
    spec = _spec(model)
    return {
        "model_type": model.architecture.family,
        "dms_alpha_scale": spec.alpha_scale,
        "dms_initial_alpha_offset": spec.alpha_offset,
        "dms_window_size": spec.window,
        "dms_paged_attention_block_size": model.block_size,
        "dms_cr": int(model.target_cr),  # rounded down, so never above the requested ratio
        "dms_tau": spec.tau,
        **_SWITCHES,
        "dms_decision_shift": spec.decision_shift,
    }


def metadata_file(model: ExportedModel) -> dict[str, dict[str, Any]]:
    """Return the content of dms_metadata.json under that name."""
    spec = _spec(model)
    content = {
        "format_version": 1,
        "config": {
            "window_size": spec.window,
            "alpha_scale": spec.alpha_scale,
            "alpha_offset": spec.alpha_offset,
            "target_cr": int(model.target_cr),
            "context_len": model.architecture.max_position_embeddings,
            "compression_mode": "relu",
            "dms_decision_shift": spec.decision_shift,
            "decision_source": DECISION_SOURCE,
        },
        "provenance": {**model.record(), "spec": spec.to_dict()},
    }
    return {METADATA_FILE: content}


def flat_shift(config: dict[str, Any]) -> int | None:
    """Return the decision shift of flat keys, by default 1; None without such keys."""
    if "dms" in config or not any(key in config for key in _KEYS):
        return None
    shift = config.get("dms_decision_shift")
    return 1 if shift is None else shift


def read_flat(
    directory: Path, config: dict[str, Any], conventions: MethodSpec, *, decision_projection: bool
) -> Stated:
    """Read what flat keys state.

    Args:
        directory: The export.
        config: Its config.json.
        conventions: Values of the consumer for settings that the keys leave open. Values that
            matter only in training come from our provenance if present.
        decision_projection: Whether a decision projection is accepted.

    Raises:
        HFError: If the keys are incomplete, contradictory or of a variant not supported.
    """
    from_hf_config(config)
    for key, only in _SWITCHES.items():
        if decision_projection and key == "dms_separate_alpha":
            continue
        if config.get(key, only) != only:
            raise HFError(f"{directory}: {key}={config[key]!r} is not supported, only {only!r}")
    if "dms_window_size" not in config:
        present = next(key for key in _KEYS if key in config)
        raise HFError(f"{directory}: config.json has {present} but no dms_window_size; state it")
    path = directory / METADATA_FILE
    stored = Values(str(path), read_json(path) if path.is_file() else {})
    trained, consumed = stored.block("provenance"), stored.block("config")
    keys = Values(f"{directory}: config.json", config)
    spec = _flat_spec(directory, keys, trained.block("spec").values, conventions)
    _check_agreement(path, consumed.values, spec)
    ratios = (
        trained.positive_or_none("target_cr"),
        consumed.positive_or_none("target_cr"),
        keys.positive_or_none("dms_cr"),
    )
    return Stated(
        spec=spec,
        target_cr=next((ratio for ratio in ratios if ratio is not None), 1.0),
        cr_factor=trained.positive_or_none("cr_factor"),
    )


def _flat_spec(
    directory: Path, keys: Values, trained: Mapping[str, Any], base: MethodSpec
) -> DMSSpec:
    assert isinstance(base, DMSSpec)
    stated = {
        "channel": base.channel,
        "eviction": base.eviction,
        "clear_after_rope": base.clear_after_rope,
        "decision_shift": keys.values.get("dms_decision_shift"),
        "window": keys.whole("dms_window_size"),
        "alpha_scale": keys.number("dms_alpha_scale", base.alpha_scale),
        "alpha_offset": keys.number("dms_initial_alpha_offset", base.alpha_offset),
        "tau": keys.positive_or_none("dms_tau"),
    }
    known = {key: value for key, value in stated.items() if value is not None}
    known.setdefault("decision_shift", 1)
    spec = read_spec_values(directory, {**(trained or base.to_dict()), **known})
    if not isinstance(spec, DMSSpec):
        raise HFError(
            f"{directory}: flat keys of DMS with method.kind={spec.kind}; export it again"
        )
    return spec


def _check_agreement(path: Path, stored: Mapping[str, Any], spec: DMSSpec) -> None:
    ours = {
        "window_size": spec.window,
        "alpha_scale": spec.alpha_scale,
        "alpha_offset": spec.alpha_offset,
        "dms_decision_shift": spec.decision_shift,
        "decision_source": DECISION_SOURCE,
    }
    for key, value in ours.items():
        if stored.get(key, value) != value:
            raise HFError(f"{path}: {key}={stored[key]!r} but config.json says {value!r}")
