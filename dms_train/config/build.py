"""Conversion of plain mappings into frozen dataclasses and back; unsuitable values are refused.

The mapping may come from YAML, JSON or Python.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar

from dms_train.config.schema import RunConfig
from dms_train.limits import NAMES
from dms_train.method.base import MethodOptions
from dms_train.method.spec import OPTIONS, options_of

T = TypeVar("T")
_MISSING_MARK = "???"


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` holds one line for each reason."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(slots=True, kw_only=True)
class _Refused:
    """Problems found so far, and every valid key to suggest."""

    known: list[str]
    lines: list[str] = field(default_factory=list)


def build(mapping: Mapping[str, Any]) -> RunConfig:
    """Build the configuration of a run.

    Args:
        mapping: Nested plain values; lists stand for tuples and `???` for a missing value.

    Raises:
        ConfigError: One line for every unknown key, wrong type and missing value.
    """
    return build_dataclass(RunConfig, mapping)


def build_dataclass(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Build any option dataclass; `path` is the key of `mapping` in the configuration."""
    known = [path, *valid_paths(cls, path)] if path else list(valid_paths(cls))
    refused = _Refused(known=known)
    result = _dataclass(cls, mapping, path, refused)
    if refused.lines:
        raise ConfigError(*refused.lines)
    return typing.cast(T, result)


def to_mapping(config: Any) -> dict[str, Any]:
    """Invert `build`: return nested dicts and lists, ready to be written as YAML or JSON."""
    return typing.cast(dict[str, Any], _plain(asdict(config)))


def valid_paths(cls: type = RunConfig, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every key below a dataclass, blocks before their contents."""
    for name, hint in _all_hints(cls).items():
        here = f"{path}.{name}" if path else name
        yield here
        nested = _dataclass_in(hint)
        if nested is not None:
            yield from valid_paths(nested, here)


def unknown_key(path: str, valid: Iterable[str]) -> str:
    """Return the line that refuses `path`, with the nearest valid key when there is one."""
    known = list(dict.fromkeys(valid))
    wrong = _shortest_unknown(path, known)
    block, _, name = wrong.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == block]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    # prefer the same name in another block, unless a sibling is very similar
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8 if elsewhere else 0.6)
    if near:
        hint = f"did you mean {block}.{near[0]}?" if block else f"did you mean {near[0]}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        hint = f"valid here: {', '.join(siblings)}"
    return f"{wrong}: unknown key; {hint}"


def _shortest_unknown(path: str, known: list[str]) -> str:
    keys = path.split(".")
    prefixes = [".".join(keys[: end + 1]) for end in range(len(keys))]
    return next((prefix for prefix in prefixes if prefix not in known), path)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the type hint of every field; a `ClassVar` is not a field."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def _all_hints(cls: type) -> dict[str, Any]:
    """Return the hints of a block; the block `method` has those of every method together."""
    blocks: Iterable[type] = OPTIONS.values() if cls is MethodOptions else (cls,)
    return {key: hint for block in blocks for key, hint in _hints(block).items()}


def _unknown(path: str, cls: type, known: list[str]) -> str:
    """Return the line that refuses a key; a key of another method is not suggested."""
    block, _, key = path.rpartition(".")
    if path not in known:
        return unknown_key(path, known)
    return f"{path}: unknown key; {block} here has {', '.join(_hints(cls))}, not {key}"


def _dataclass_in(hint: Any) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((h for h in options if isinstance(h, type) and is_dataclass(h)), None)


def _dataclass(cls: type, mapping: Any, path: str, refused: _Refused) -> Any:
    if not isinstance(mapping, Mapping):
        refused.lines.append(
            f"{path}={mapping!r}: expected a block with keys {', '.join(_hints(cls))}"
        )
        return None
    if cls is MethodOptions:
        try:
            cls = options_of(mapping)
        except ValueError as error:
            refused.lines.append(str(error))
            return None
    dotted = {name: f"{path}.{name}" if path else name for name in (*_hints(cls), *mapping)}
    unknown = [str(key) for key in mapping if key not in _hints(cls)]
    refused.lines += [_unknown(dotted[key], cls, refused.known) for key in unknown]
    values = {}
    for item in fields(cls):
        here, value = dotted[item.name], mapping.get(item.name, item.default)
        if value is MISSING or (isinstance(value, str) and value == _MISSING_MARK):
            refused.lines.append(f"{here}: missing; set {here}=...")
        elif item.name in mapping:
            values[item.name] = _value(_hints(cls)[item.name], value, here, refused)
    return None if refused.lines else cls(**values)


def _value(hint: Any, value: Any, path: str, refused: _Refused) -> Any:
    if isinstance(hint, UnionType):
        options = [h for h in typing.get_args(hint) if h is not NoneType]
        chosen = next((h for h in options if type(value) is h), options[0])
        return None if value is None else _value(chosen, value, path, refused)
    if is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, path, refused)
    if typing.get_origin(hint) is tuple:
        return _tuple(hint, value, path, refused)
    if typing.get_origin(hint) is dict:
        return _numbered(hint, value, path, refused)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        refused.lines.append(f"{path}={value!r}: expected {NAMES[hint]}")
    return value


def _tuple(hint: Any, value: Any, path: str, refused: _Refused) -> Any:
    item = typing.get_args(hint)[0]
    if not isinstance(value, list | tuple):
        refused.lines.append(f"{path}={value!r}: expected a list, each item {_name(item)}")
        return None
    return tuple(_value(item, v, f"{path}[{i}]", refused) for i, v in enumerate(value))


def _numbered(hint: Any, value: Any, path: str, refused: _Refused) -> Any:
    """Read a mapping whose keys are whole numbers."""
    item = typing.get_args(hint)[1]
    if not isinstance(value, Mapping) or not all(type(key) is int for key in value):
        refused.lines.append(
            f"{path}={value!r}: expected {{0: ..., 1: ...}}, each item {_name(item)}"
        )
        return None
    return {key: _value(item, each, f"{path}.{key}", refused) for key, each in value.items()}


def _name(hint: Any) -> str:
    return NAMES.get(hint, "a block of keys")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
