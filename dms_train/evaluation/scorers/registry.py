"""Scorers by name: every subclass of `Scorer` in this package that states its name."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module

from dms_train.evaluation import scorers
from dms_train.evaluation.scorers.base import Scorer


@cache
def all_scorers() -> dict[str, Scorer]:
    """An instance of every scorer, by name."""
    found: dict[str, Scorer] = {}
    for entry in pkgutil.iter_modules(scorers.__path__, f"{scorers.__name__}."):
        for value in vars(import_module(entry.name)).values():
            if inspect.isclass(value) and issubclass(value, Scorer) and "name" in vars(value):
                found[value.name] = value()
    return dict(sorted(found.items()))
