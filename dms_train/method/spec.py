"""Find the methods by their packages, and read stored specifications and presets; no torch.

A `method` block and a stored specification name their method under the key `kind`; without it the
method is Dynamic Memory Sparsification. `conf/method/NAME.yaml` holds all values of each preset, so
that options have no defaults; `PRESETS` is read from these files.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dms_train.method.base import SPEC_VERSION, MethodOptions, MethodSpec

KIND = "kind"
DEFAULT_METHOD = "dms"
_PRESET_DIR = Path(__file__).resolve().parents[1] / "conf" / "method"


class NewerSpecError(ValueError):
    """A specification was stored by a newer version of this program."""


def _modules() -> dict[str, Any]:
    packages = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.ispkg)
    return {name: importlib.import_module(f"{__package__}.{name}.spec") for name in packages}


_METHODS = _modules()
OPTIONS: dict[str, type[MethodOptions]] = {name: m.OPTIONS for name, m in _METHODS.items()}
"""The `method` block of every method, by the name of its package."""


def options_of(values: Mapping[str, Any]) -> type[MethodOptions]:
    """Return the class of a `method` block.

    Raises:
        ValueError: The block names no method; the message lists the known ones.
    """
    return OPTIONS[_kind(values)]


def spec_from_dict(values: Mapping[str, Any]) -> MethodSpec:
    """Read a stored specification of this or an earlier version.

    A specification without a `version` is of version 1.

    Raises:
        NewerSpecError: The stored version is newer than `SPEC_VERSION`.
        ValueError: A key is missing or unknown, or a value cannot be used.
    """
    version = values.get("version", 1) if isinstance(values, Mapping) else 1
    if type(version) is not int or version < 1:
        raise ValueError(f"method spec version {version!r}: expected a whole number from 1")
    if version > SPEC_VERSION:
        raise NewerSpecError(
            f"method spec version {version}: this version of dms-train reads up to {SPEC_VERSION}; "
            "install a newer dms-train"
        )
    # after the version, because a newer version may have methods of its own
    kind = _kind(values)
    current = {key: value for key, value in values.items() if key != "version"} | {KIND: kind}
    for earlier in range(version, SPEC_VERSION):
        current = _UPGRADES[earlier](current)
    spec: MethodSpec = _METHODS[kind].SPEC.from_fields(current)
    return spec


def _without_training(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the training constants that version 1 stored; no output of a model depends on them."""
    training = (
        "alpha_in_loss", "aux_form", "kl_direction", "kl_temperature", "consistency", "prior",
    )  # fmt: skip
    return {key: value for key, value in values.items() if key not in training}


# By version: function that upgrades its specification to the next version. A new field gets its
# value here.
_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _without_training}


def options_from(spec: MethodSpec) -> MethodOptions:
    """Complete a stored specification with the constants of training of its method's main preset.

    Only for work that computes no loss, such as conversions.
    """
    return PRESETS[spec.kind].override(**asdict(spec))


def _kind(values: Mapping[str, Any]) -> str:
    if not isinstance(values, Mapping):
        raise ValueError(f"method={values!r}: expected a mapping of constants")
    kind = values.get(KIND, DEFAULT_METHOD)
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise ValueError(f"method.{KIND}={kind}: choose one of {', '.join(OPTIONS)}")
    return kind


def _presets() -> dict[str, MethodOptions]:
    presets = {}
    for file in sorted(_PRESET_DIR.glob("*.yaml")):
        values = yaml.safe_load(file.read_text("utf-8"))
        preset = options_of(values).from_fields({KIND: DEFAULT_METHOD, **values})
        preset.require_valid()
        presets[file.stem] = preset.override(channel=preset.spec.channel)
    return presets


PRESETS = _presets()
"""Every preset by name, for models whose channels are not ranked: `auto` is the first channel."""
