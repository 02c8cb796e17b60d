"""Tasks by name: modules of this package and of other distributions.

Another distribution adds a task by an entry point of the group `dms_train.tasks` that names a
subclass of `Task`, a running program with `register_task`. The entry point has the task's name.
"""

from __future__ import annotations

from dms_train.evaluation import tasks
from dms_train.evaluation.registry import Registry
from dms_train.evaluation.tasks.base import Task

GROUP = "dms_train.tasks"
_TASKS = Registry(Task, tasks, GROUP, "task.name")  # type: ignore[type-abstract]


def register_task(task: type[Task]) -> None:
    """Add a task, or replace the one with its name, in this process."""
    _TASKS.register(task)


def all_tasks() -> dict[str, Task]:
    """Return an instance of every task, by name.

    Raises:
        EvaluationError: An entry point cannot be used.
    """
    return _TASKS.all()


def task(name: str) -> Task:
    """Return the task with this name.

    Raises:
        EvaluationError: The name is unknown, or its entry point cannot be used.
    """
    return _TASKS.get(name)
