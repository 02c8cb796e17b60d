"""Registry of the families, found by their modules."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from dms_train.families.base import ModelFamily

_NOT_FAMILIES = ("base", "registry")


def _found() -> dict[str, ModelFamily]:
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = {
        name: importlib.import_module(f"{__package__}.{name}")
        for name in names
        if name not in _NOT_FAMILIES
    }
    return {name: module.FAMILY for name, module in modules.items()}


FAMILIES: dict[str, ModelFamily] = _found()
"""Families by name, which is also their `model_type` in Hugging Face, in alphabetical order."""
