"""Limits of option values, stated where a field is declared, and one line for each value beyond.

    steps: Annotated[int, AtLeast(1)]

A dataclass whose fields depend on each other has a method `check(path)` that yields further lines.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol


class Limit(Protocol):
    """What a value must satisfy."""

    def refusal(self, value: Any) -> str | None:
        """How to change `value` so that it can be used; None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)

    def refusal(self, value: Any) -> str | None:
        """The choices."""
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
        """The form."""
        return None if re.fullmatch(self.pattern, value) else f"use {self.words}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A finite number, not below `least`."""

    least: float

    def refusal(self, value: float) -> str | None:
        """The limit."""
        if value == math.inf:
            return "use a finite number"
        return None if value >= self.least else f"use at least {self.least}"


@dataclass(frozen=True, slots=True)
class Below:
    """A number below `limit`."""

    limit: float

    def refusal(self, value: float) -> str | None:
        """The limit."""
        return None if value < self.limit else f"use a number below {self.limit}"


@dataclass(frozen=True, slots=True)
class Positive:
    """A finite number above 0."""

    def refusal(self, value: float) -> str | None:
        """The limit."""
        if value == math.inf:
            return "use a finite number"
        return None if value > 0 else "use a number above 0"


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1; `below_one` excludes 1."""

    below_one: bool = False

    def refusal(self, value: float) -> str | None:
        """The limits."""
        if 0 <= value < 1 or (value == 1 and not self.below_one):
            return None
        return f"use a number from 0 to {'below ' if self.below_one else ''}1"


def problems(options: Any, path: str = "") -> Iterator[str]:
    """One line for every value of a dataclass, and of those inside it, that is beyond its limits.

    Args:
        options: The dataclass. A value of None is only compared with the choices of `OneOf`.
        path: Key of the dataclass in the configuration; it leads every line.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    comparable = True
    for item in fields(options):
        value = getattr(options, item.name)
        here = f"{path}.{item.name}" if path else item.name
        if is_dataclass(value):
            yield from problems(value, here)
        expected = _expected_kind(value, hints[item.name])
        if expected is not None:
            yield f"{here}={value!r}: use {expected}"
            comparable = False
            continue
        for limit in getattr(hints[item.name], "__metadata__", ()):
            refusal = None if _is_unset(value, limit) else limit.refusal(value)
            if refusal is not None:
                yield f"{here}={value}: {refusal}"
    if comparable and hasattr(options, "check"):
        yield from options.check(path)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _expected_kind(value: Any, hint: Any) -> str | None:
    """Return what a value should be if its type is wrong; None if it is right or not checked."""
    limited = typing.get_origin(hint) is typing.Annotated  # its limits refuse NaN
    base = typing.get_args(hint)[0] if limited else hint
    kinds = typing.get_args(base) or (base,)
    known = [kind for kind in kinds if kind in _KINDS]
    if len(known) + (type(None) in kinds) < len(kinds):
        return None  # another dataclass or a container, which its own code checks
    if value is None and type(None) in kinds:
        return None
    allowed = {*known, int} if float in known else set(known)
    if type(value) in allowed and (limited or value == value):  # NaN differs from itself
        return None
    return " or ".join(_KINDS[kind] for kind in known)


def _is_unset(value: Any, limit: Limit) -> bool:
    return value is None and not isinstance(limit, OneOf)
