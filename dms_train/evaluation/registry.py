"""Named classes of one kind: of a package, of entry points, and registered in this process."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import ClassVar, Generic, Protocol, TypeVar

from dms_train.evaluation.errors import EvaluationError


class Named(Protocol):
    """Class with a name."""

    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """Subclasses of one class by their names.

    Args:
        kind: Base class. Every subclass that states a `name` is an entry.
        package: Package whose modules hold the built-in subclasses.
        group: Group of entry points by which other distributions add subclasses.
        key: How error messages name the choice, for example `task.name`.
    """

    def __init__(self, kind: type[Kind], package: ModuleType, group: str, key: str) -> None:
        self._kind, self._package, self._group, self._key = kind, package, group, key
        self._registered: dict[str, Kind] = {}

    def register(self, subclass: type[Kind]) -> None:
        """Add a subclass, or replace the one with its name, in this process."""
        self._registered[subclass.name] = subclass()

    def names(self) -> list[str]:
        """Return all names, sorted; entry points are not loaded."""
        return sorted({*self._built_in, *self._entry_points, *self._registered})

    def get(self, name: str) -> Kind:
        """Return an instance of the subclass with this name.

        Raises:
            EvaluationError: The name is unknown, or its entry point cannot be used.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._built_in:
            return self._built_in[name]
        if name not in self._entry_points:
            raise EvaluationError(f"{self._key}={name}: choose one of {', '.join(self.names())}")
        self.register(self._loaded(self._entry_points[name]))
        return self._registered[name]

    def all(self) -> dict[str, Kind]:
        """Return an instance of every subclass, by name."""
        return {name: self.get(name) for name in self.names()}

    @cached_property
    def _built_in(self) -> dict[str, Kind]:
        instances: dict[str, Kind] = {}
        for entry in pkgutil.iter_modules(self._package.__path__, f"{self._package.__name__}."):
            for value in vars(import_module(entry.name)).values():
                if self._is_entry(value):
                    instances[value.name] = value()
        return instances

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._group)}

    def _is_entry(self, value: object) -> bool:
        is_subclass = inspect.isclass(value) and issubclass(value, self._kind)
        return is_subclass and "name" in vars(value)

    def _loaded(self, entry: EntryPoint) -> type[Kind]:
        given = f"{self._key}={entry.name}"
        try:
            subclass = entry.load()
        except (ImportError, AttributeError) as error:
            raise EvaluationError(f"{given}: its entry point does not load ({error})") from None
        if not self._is_entry(subclass) or subclass.name != entry.name:
            raise EvaluationError(
                f"{given}: its entry point names {entry.value}, which is no "
                f"{self._kind.__name__} with this name"
            )
        return subclass  # type: ignore[no-any-return]
