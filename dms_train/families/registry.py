"""Registry of the families, found by their modules."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from dms_train.families.base import ModelFamily

_NOT_FAMILIES = ("base", "registry")


def _found() -> dict[str, ModelFamily]:
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    names = sorted(file.name for file in files if not file.ispkg)
    return {
        name: importlib.import_module(f"{__package__}.{name}").FAMILY
        for name in names
        if name not in _NOT_FAMILIES
    }


FAMILIES: dict[str, ModelFamily] = _found()
"""Families by name, which is also their `model_type` in Hugging Face, in alphabetical order."""
