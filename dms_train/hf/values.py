"""Typed access to the values of JSON files; one line refuses a value of another type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dms_train.hf.errors import HFError

_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Values:
    """A JSON object whose values are read with their type.

    Attributes:
        where: File, and the block in it; every message starts with it.
        values: The object.
    """

    where: str
    values: Mapping[str, Any]

    def refusal(self, key: str, value: Any, fix: str) -> HFError:
        """Build the error that names a key, its value and a remedy."""
        shown = "null" if value is None else repr(value)
        return HFError(f"{self.where}: {key}={shown} is not supported; {fix}")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; HFError if it is of another type, or absent without default."""
        value = self._get(key, default)
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer beyond the largest float
            number = math.inf
        if not math.isfinite(number):
            raise self.refusal(key, value, "state a finite number")
        return number

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0; errors as `number`."""
        number = self.number(key, default)
        if number <= 0:
            raise self.refusal(key, self.values[key], "state a number above 0")
        return number

    def positive_or_none(self, key: str) -> float | None:
        """Return a finite number above 0, or None if absent or null; errors as `number`."""
        return None if self.values.get(key) is None else self.positive(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0 that fits 32 bits; errors as `number`."""
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise self.refusal(key, value, f"state a whole number from 1 to {_LARGEST}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; HFError if it is of another type."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.refusal(key, value, "state true or false")
        return value

    def block(self, key: str) -> Values:
        """Return a JSON object inside this one, empty if absent or null; HFError if it is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, value, "state a JSON object or null")
        return Values(f"{self.where}: {key}", value or {})

    def _get(self, key: str, default: Any) -> Any:
        if key not in self.values and default is None:
            raise HFError(f"{self.where}: {key} is missing; state it")
        return self.values.get(key, default)
