"""Policies by name: modules of this package, and policies of other distributions.

A policy is one module, named after it, with `POLICY = PolicyKind(Options, build)`. Another
distribution adds such an object with an entry point of the group `dms_train.policies`. A running
program adds one with `register_policy`. This module does not import torch, so that commands can
list the names quickly.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dms_train.inference.errors import InferenceError
from dms_train.limits import problems
from dms_train.method.base import MethodSpec

if TYPE_CHECKING:
    from dms_train.inference.policies.base import CachePolicy, PolicyKind

GROUP = "dms_train.policies"
AUTO = "auto"  # the policy that the model was trained for
_NOT_POLICIES = (
    "base",
    "budget",
    "calibration",
    "every_step",
    "eviction",
    "kernel_rules",
    "local_layers",
    "attention_scores",
    "registry",
    "rotation",
    "score_policy",
)
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_registered: dict[str, PolicyKind] = {}


def register_policy(name: str, kind: PolicyKind) -> None:
    """Add a policy, or replace one, in this process."""
    _registered[name] = kind


def policy_names() -> tuple[str, ...]:
    """Return the valid values of `policy`, `auto` first."""
    return AUTO, *sorted({*_modules(), *_entry_points(), *_registered})


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` words; a value that is not JSON is a text.

    Raises:
        InferenceError: A word has no `=`.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            raise InferenceError(f"policy option {word}: write KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def check_policy(name: str, options: Mapping[str, Any]) -> None:
    """Fail if a policy does not have these options, before a model is loaded.

    Raises:
        InferenceError: An option does not exist; the line names it and the valid ones.
    """
    if name == AUTO:
        if options:
            raise InferenceError(
                f"policy=auto: takes no options, got {', '.join(options)}; name a policy"
            )
        return
    _options(name, options)


def build_policy(name: str, options: Mapping[str, Any], spec: MethodSpec | None) -> CachePolicy:
    """Build the policy called `name` for a model.

    Args:
        name: One of `policy_names()`; `auto` is the policy that the model was trained for, else
            `keep_all`.
        options: Fields of the policy's options.
        spec: Spec that the model was trained for; None for a dense one.

    Raises:
        InferenceError: An option or the model does not fit the policy.
    """
    check_policy(name, options)
    if name == AUTO:
        name = "keep_all" if spec is None else spec.kind
    kind = policy_kind(name)
    if kind.trained and (spec is None or spec.kind != name):
        what = "is dense" if spec is None else f"was trained for {spec.kind}"
        raise InferenceError(f"policy={name}: the model {what}, not trained for it")
    return kind.build(_options(name, options), spec)


def policy_kind(name: str) -> PolicyKind:
    """Find the policy with this name.

    Raises:
        InferenceError: There is none, or an entry point names an object that is no policy.
    """
    if name in _registered:
        return _registered[name]
    loaded: Any
    if name in _modules():
        loaded = importlib.import_module(f"{__package__}.{name}").POLICY
    elif name in _entry_points():
        try:
            loaded = _entry_points()[name].load()
        except (ImportError, AttributeError) as error:
            raise InferenceError(
                f"policy={name}: its entry point does not load ({error})"
            ) from None
    else:
        raise InferenceError(f"policy={name!r}: choose one of {', '.join(policy_names())}")
    kind: type[PolicyKind] = importlib.import_module(f"{__package__}.base").PolicyKind
    if not isinstance(loaded, kind):
        raise InferenceError(f"policy={name}: its entry point names no PolicyKind")
    return loaded


@cache
def _modules() -> tuple[str, ...]:
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(name for name in names if name not in _NOT_POLICIES)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _options(name: str, values: Mapping[str, Any]) -> Any:
    """Build the policy's options from these values, checked."""
    cls = policy_kind(name).options
    hints = typing.get_type_hints(cls)
    known = [item.name for item in fields(cls)]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            valid = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise InferenceError(f"policy={name}: no option {key}; {valid}")
        wanted = typing.get_args(hints[key]) or (hints[key],)
        if type(value) not in wanted and not (float in wanted and type(value) is int):
            raise InferenceError(f"policy={name} {key}={value!r}: expected {_TYPES[wanted[0]]}")
    built = cls(**values)
    for line in problems(built):
        raise InferenceError(f"policy={name} {line}")
    return built
