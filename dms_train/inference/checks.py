"""Checks of values that callers pass: numbers, flags and token ids, of Python or numpy."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

from dms_train.inference.errors import InferenceError


class Range(NamedTuple):
    """Range of a number.

    Attributes:
        least: Smallest value.
        most: Largest value.
        words: Type and range in words, for messages.
    """

    least: float
    most: float
    words: str


def integer(name: str, value: Any, allowed: Range) -> int:
    """Return a value of any integer type as a Python int.

    Args:
        name: Name of the value, for the message.
        value: The value.
        allowed: Allowed range.

    Raises:
        InferenceError: It is not an integer, or outside the range.
    """
    plain = _integer(value)
    if plain is None or not allowed.least <= plain <= allowed.most:
        raise _refusal(name, value, allowed.words)
    return plain


def number(name: str, value: Any, allowed: Range) -> float:
    """Return a value of any real type as a Python float; arguments as in `integer`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        plain = float(value) if real else math.nan
    except OverflowError:  # the integer is too large for a float
        plain = math.nan
    if not allowed.least <= plain <= allowed.most:  # false for NaN
        raise _refusal(name, value, allowed.words)
    return plain


def require_flag(name: str, value: Any) -> None:
    """Fail if the value is not True or False."""
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")


def token_ids(name: str, values: Any, vocabulary: float = math.inf) -> list[int]:
    """Return token ids as Python integers.

    Args:
        name: Name of the argument, for the message.
        values: A list, an array or a tensor.
        vocabulary: Size of the vocabulary.

    Raises:
        InferenceError: One of them is not an integer, is negative or outside the vocabulary.
    """
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    plain = type(values) is list and set(map(type, values)) == {int}  # a fast path for long prompts
    if plain and min(values) >= 0 and max(values) < vocabulary:
        return list(values)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _refusal(name, values, "a list of token ids")
    tokens = []
    for value in values:
        token = value if type(value) is int else _integer(value)
        if token is None or not 0 <= token < vocabulary:
            most = "" if vocabulary == math.inf else f" and below {vocabulary}"
            raise _refusal(f"{name}: token", value, f"an integer of at least 0{most}")
        tokens.append(token)
    return tokens


def texts(name: str, values: Any) -> tuple[str, ...]:
    """Return a tuple or list of non-empty texts as a tuple.

    Raises:
        InferenceError: The value is something else.
    """
    if not isinstance(values, tuple | list) or not all(
        isinstance(value, str) and value for value in values
    ):
        raise _refusal(name, values, "a tuple of non-empty texts")
    return tuple(values)


def _integer(value: Any) -> int | None:
    """Return the value as an integer; None for other types and for bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _refusal(name: str, value: Any, words: str) -> InferenceError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return InferenceError(f"{name}={shown}: must be {words}")
