"""Tasks by name: every subclass of `Task` in a module of this package that states its name."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module

from dms_train.evaluation import tasks
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.tasks.base import Task


@cache
def all_tasks() -> dict[str, Task]:
    """An instance of every task, by name."""
    found: dict[str, Task] = {}
    for entry in pkgutil.iter_modules(tasks.__path__, f"{tasks.__name__}."):
        for value in vars(import_module(entry.name)).values():
            if inspect.isclass(value) and issubclass(value, Task) and "name" in vars(value):
                found[value.name] = value()
    return dict(sorted(found.items()))


def task(name: str) -> Task:
    """The task with this name.

    Raises:
        EvaluationError: There is none.
    """
    known = all_tasks()
    if name not in known:
        raise EvaluationError(f"task.name={name}: choose one of {', '.join(known)}")
    return known[name]
