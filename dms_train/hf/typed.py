"""Decorator that checks the arguments of public functions against their annotations."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from dms_train.hf.errors import HFError

P = ParamSpec("P")
T = TypeVar("T")
_SHOWN = (str, int, float, types.NoneType)


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse an argument of another type than its annotation with one line that names it.

    Contents of containers are not compared. A whole number is accepted as a float; true and false
    are not accepted as numbers.

    Raises:
        HFError: At the call, before the function runs.
    """
    signature = inspect.signature(function)
    label = function.__qualname__.removesuffix(".__init__")
    allowed = functools.cache(
        lambda: {name: _kinds(hint) for name, hint in typing.get_type_hints(function).items()}
    )

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own message names the function
        for name, value in given.items():
            kinds = allowed().get(name, [object])
            if type(value) not in kinds and not any(_fits(value, kind) for kind in kinds):
                shown = f"={value!r}" if isinstance(value, _SHOWN) else ""
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise HFError(
                    f"{label}: {name}{shown} is of type {type(value).__name__}; give {wanted}"
                )
        return function(*args, **kwargs)

    return checked


def _kinds(hint: Any) -> list[type]:
    """List the classes that an annotation allows; `object` where it is no class."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return [kind for argument in typing.get_args(hint) for kind in _kinds(argument)]
    kind = origin or hint
    known = isinstance(kind, type) and kind is not Any and not hasattr(kind, "_is_protocol")
    return [kind if known else object]


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
