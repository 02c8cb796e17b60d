"""Limits of option values, stated where a field is declared, and one line for each value beyond.

    steps: Annotated[int, AtLeast(1)]

A dataclass whose fields depend on each other has a method `check(path)` that yields further lines.
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Protocol

AUTO = "auto"
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Limit(Protocol):
    """Condition that a value must satisfy."""

    def refusal(self, value: Any) -> str | None:
        """Return how to change `value` so that it can be used; None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)

    def refusal(self, value: Any) -> str | None:
        """Return the choices, unless `value` is one of them."""
        if value in self.choices:
            return None
        names = ("null" if choice is None else str(choice) for choice in self.choices)
        return f"choose one of {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class Matches:
    """A text of one form.

    Attributes:
        pattern: Regular expression of the whole text.
        words: The form in words.
    """

    pattern: str
    words: str

    def refusal(self, value: str) -> str | None:
        """Return the form, unless `value` has it."""
        return None if re.fullmatch(self.pattern, value) else f"use {self.words}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A finite number, not below `least`."""

    least: float

    def refusal(self, value: float) -> str | None:
        """Return the limit, unless `value` keeps it."""
        if value == math.inf:
            return "use a finite number"
        return None if value >= self.least else f"use at least {self.least}"


@dataclass(frozen=True, slots=True)
class OrAuto:
    """`auto`, or a value within another limit."""

    limit: Limit

    def refusal(self, value: Any) -> str | None:
        """Return both choices, unless `value` is one of them."""
        refusal = "use a number" if isinstance(value, str) else self.limit.refusal(value)
        return None if value == AUTO or refusal is None else f"{refusal}, or {AUTO}"


@dataclass(frozen=True, slots=True)
class Below:
    """A number below `limit`."""

    limit: float

    def refusal(self, value: float) -> str | None:
        """Return the limit, unless `value` keeps it."""
        return None if value < self.limit else f"use a number below {self.limit}"


@dataclass(frozen=True, slots=True)
class Positive:
    """A finite number above 0."""

    def refusal(self, value: float) -> str | None:
        """Return the limit, unless `value` keeps it."""
        if value == math.inf:
            return "use a finite number"
        return None if value > 0 else "use a number above 0"


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1; `below_one` excludes 1."""

    below_one: bool = False

    def refusal(self, value: float) -> str | None:
        """Return the limits, unless `value` keeps them."""
        if 0 <= value < 1 or (value == 1 and not self.below_one):
            return None
        return f"use a number from 0 to {'below ' if self.below_one else ''}1"


def problems(options: Any, path: str = "") -> Iterator[str]:
    """Yield one line for every unusable value of a dataclass and of those inside it.

    Limits are only tried once every value has the type of its field.

    Args:
        options: The dataclass. A value of None is only compared with the choices of `OneOf`.
        path: Key of the dataclass in the configuration; it leads every line.
    """
    found = list(wrong_types(options, path))
    yield from found or _beyond_limits(options, path)


def wrong_types(options: Any, path: str = "") -> Iterator[str]:
    """Yield the lines of `problems` about types alone."""
    for here, value, hint in _values(options, path):
        expected = _expected(value, hint)
        if expected is not None:
            yield f"{here}={value!r}: expected {expected}"
        elif is_dataclass(value):
            yield from wrong_types(value, here)


def _values(options: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and type of every field."""
    hints = _hints(options.__class__)
    for item in fields(options):
        here = f"{path}.{item.name}" if path else item.name
        yield here, getattr(options, item.name), hints[item.name]


@functools.cache
def _hints(declared: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, whose text Python evaluates at every request."""
    return typing.get_type_hints(declared, include_extras=True)


def _beyond_limits(options: Any, path: str) -> Iterator[str]:
    for here, value, hint in _values(options, path):
        if is_dataclass(value):
            yield from _beyond_limits(value, here)
        for limit in getattr(hint, "__metadata__", ()):
            refusal = None if _is_unset(value, limit) else limit.refusal(value)
            if refusal is not None:
                yield f"{here}={value}: {refusal}"
    if hasattr(options, "check"):
        yield from options.check(path)


def _expected(value: Any, hint: Any) -> str | None:
    """Return what a field with this type takes instead of `value`; None if it takes it."""
    limited = typing.get_origin(hint) is typing.Annotated  # its limits refuse NaN
    hint = typing.get_args(hint)[0] if limited else hint
    if isinstance(hint, UnionType):
        others = [each for each in typing.get_args(hint) if each is not NoneType]
        expected = [_expected(value, each) for each in others]
        sound = None in expected or (value is None and NoneType in typing.get_args(hint))
        return None if sound else " or ".join(filter(None, expected))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        sound = isinstance(value, tuple) and not any(_expected(each, item) for each in value)
        return None if sound else f"a tuple, each item {NAMES.get(item, item.__name__)}"
    if isinstance(hint, type) and is_dataclass(hint):
        return None if isinstance(value, hint) else hint.__name__
    if hint not in NAMES:
        return None  # another container, which its own code checks
    if type(value) not in ((int, float) if hint is float else (hint,)):
        return NAMES[hint]
    if value != value and not limited:
        return "a number, not NaN"
    return f"{NAMES[hint]} of up to 63 bits" if _overflows(value) else None


def _overflows(value: Any) -> bool:
    return type(value) is int and value.bit_length() > 63


def _is_unset(value: Any, limit: Limit) -> bool:
    return value is None and not isinstance(limit, OneOf)
