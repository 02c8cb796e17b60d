"""The methods, found by their packages, and the presets of each; no torch.

A `method` block and a stored specification name their method under the key `kind`; without it they
are of Dynamic Memory Sparsification. A spec is stored with each checkpoint and export.
`conf/method/NAME.yaml` holds all values of each preset, so that options have no defaults; `PRESETS`
is read from these files.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dms_train.method.base import MethodOptions, MethodSpec

KIND = "kind"
_DEFAULT = "dms"
_PRESET_DIR = Path(__file__).resolve().parents[1] / "conf" / "method"


def _modules() -> dict[str, Any]:
    packages = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.ispkg)
    return {name: importlib.import_module(f"{__package__}.{name}.spec") for name in packages}


_METHODS = _modules()
OPTIONS: dict[str, type[MethodOptions]] = {name: m.OPTIONS for name, m in _METHODS.items()}
"""The `method` block of every method, by the name of its package."""


def options_of(values: Mapping[str, Any]) -> type[MethodOptions]:
    """The class of a `method` block.

    Raises:
        ValueError: It names no method; the known ones are listed.
    """
    return OPTIONS[_kind(values)]


def spec_of(options: MethodOptions) -> MethodSpec:
    """The checked constants of a configuration.

    Raises:
        ValueError: One line for every value that cannot be used.
    """
    found: MethodSpec = _METHODS[options.kind].SPEC(**asdict(options))
    return found


def spec_from_dict(values: Mapping[str, Any]) -> MethodSpec:
    """A stored specification; unknown or missing keys raise ValueError naming them."""
    found: MethodSpec = _METHODS[_kind(values)].SPEC.from_dict(dict(values))
    return found


def _kind(values: Mapping[str, Any]) -> str:
    if not isinstance(values, Mapping):
        raise ValueError(f"method={values!r}: expected a mapping of constants")
    kind = values.get(KIND, _DEFAULT)
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise ValueError(f"method.{KIND}={kind}: choose one of {', '.join(OPTIONS)}")
    return kind


def _presets() -> dict[str, MethodSpec]:
    files = sorted(_PRESET_DIR.glob("*.yaml"))
    return {file.stem: spec_from_dict(_values(file)) for file in files}


def _values(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return values


PRESETS = _presets()
