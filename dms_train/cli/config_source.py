"""Conversion of YAML presets and command-line overrides into a `RunConfig`.

Hydra composes the values. Its errors become a one-line `ConfigError` that names the
nearest valid key or group option.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dms_train import limits
from dms_train.config.build import (
    ConfigError,
    build,
    build_dataclass,
    unknown_key,
    valid_paths,
)
from dms_train.config.resolve import resolved
from dms_train.config.schema import RunConfig
from dms_train.evaluation.options import CachePolicyOptions, EvaluationOptions

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
CONFIG_NAME = "train"
_PRESET = "method.preset"
_POLICY = "policy"
ASSETS_DIR = CONF_DIR.parent / "assets"

# `${asset:NAME}` in a configuration is the path of a file or folder that the package ships.
OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS_DIR / name), replace=True)


def compose(
    overrides: Sequence[str], config_dir: Path | None = None, *, default_paths: Sequence[str] = ()
) -> RunConfig:
    """Compose the configuration of a run.

    Args:
        overrides: Command-line overrides such as `experiment=tiny_retrofit` or `optim.lr=1e-4`.
        config_dir: Folder searched for group files in addition to those of the package.
        default_paths: `data.paths` if neither a file nor an override sets them.

    Raises:
        ConfigError: One line for every problem.
    """
    explain(overrides, config_dir)
    search = [f"hydra.searchpath=[{config_dir.resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            node = hydra_compose(CONFIG_NAME, overrides=[*overrides, *search])
            if default_paths and OmegaConf.is_missing(node.data, "paths"):
                node.data.paths = list(default_paths)
            return from_hydra(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def compose_evaluation(overrides: Sequence[str]) -> EvaluationOptions:
    """Compose the configuration of `dms-eval`.

    Args:
        overrides: Command-line overrides such as `task.name=aime24` or `sweep.widths=[1,4]`.
            `policy=NAME` chooses a policy, and `policy.KEY=VALUE` sets any of its options.

    Raises:
        ConfigError: One line for every problem.
    """
    known = list(valid_paths(EvaluationOptions))
    problems = [problem for text in overrides if (problem := _explain_key(text, known))]
    if problems:
        raise ConfigError(*problems)
    kept, policy_options = _with_policy(overrides)
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            node = hydra_compose("eval", overrides=kept)
        plain: Any = OmegaConf.to_container(node, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    options = build_dataclass(EvaluationOptions, plain)
    beyond = list(limits.problems(options))
    if beyond:
        raise ConfigError(*beyond)
    policy = replace(options.policy, options=(*options.policy.options, *policy_options))
    return replace(options, policy=policy)


def _with_policy(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into keys of `conf/eval.yaml` and options of the policy, as `KEY=JSON`.

    Unknown options and unsuitable values are refused with a list of the policy's options.
    """
    own = {item.name for item in fields(CachePolicyOptions)}
    kept, words = [], []
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        block, _, key = override.key_or_group.partition(".")
        if block != _POLICY or key in own or _assigns_block(override):
            kept.append(text)
        elif key:
            words.append(f"{key}={json.dumps(_plain_value(override))}")
        else:
            kept.append(f"{_POLICY}.name={_plain_value(override)}")
    return kept, words


def _plain_value(override: Override) -> Any:
    """Return a number, text, truth value or None; quotes around a text are removed."""
    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def from_hydra(node: Any) -> RunConfig:
    """Freeze and resolve what Hydra composed; ConfigError if it does not fit."""
    try:
        plain: Any = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    return resolved(build(plain))


def explain(overrides: Sequence[str], config_dir: Path | None = None) -> None:
    """Refuse overrides that name no key or no group option, before Hydra sees them."""
    groups, known = group_options(config_dir), list(valid_paths())
    problems = []
    for text in overrides:
        problem = _explain_one(text, groups, known)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(*problems)


def group_options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return the options of every configuration group."""
    options: dict[str, list[str]] = {}
    for root in filter(None, (CONF_DIR, config_dir)):
        for file in sorted(root.glob("*/*.yaml")):
            options.setdefault(file.parent.name, []).append(file.stem)
    return options


def _explain_one(text: str, groups: dict[str, list[str]], known: list[str]) -> str | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return f"{text!r}: not an override; write key=value, quoting spaces and commas"
    key = override.key_or_group
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return None
    if key in groups and not _assigns_block(override):
        if override.is_add():
            return f"+{key}: every run already chooses its {key}; write {key}=... without the +"
        return _explain_choice(override, groups[key])
    if key == _PRESET:
        return (
            f"{_PRESET}={override.value()}: a preset is chosen with its values; choose one of "
            f"{', '.join(f'method={name}' for name in groups['method'])}"
        )
    if key in known:
        again = override.is_add() and not _assigns_block(override)
        return f"+{key}: every run has this key; write {key}=... without the +" if again else None
    return unknown_key(key, [*known, *groups])


def _explain_key(text: str, known: list[str]) -> str | None:
    """Explain what is wrong with an override of `dms-eval`; None if it is valid."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return f"{text!r}: not an override; write key=value, quoting spaces and commas"
    key = override.key_or_group
    if key.startswith(f"{_POLICY}."):
        nested = override.is_sweep_override() or isinstance(override.value(), dict)
        return f"{key}: one value for one run" if nested else None
    return None if key in known else unknown_key(key, known)


def _assigns_block(override: Override) -> bool:
    return isinstance(override.value(), dict)


def _explain_choice(override: Override, options: list[str]) -> str | None:
    group, choices = override.key_or_group, _choices(override)
    for choice in choices:
        if choice is not None and str(choice) not in options:
            near = difflib.get_close_matches(str(choice), options, n=1, cutoff=0.5)
            hint = f"did you mean {group}={near[0]}? " if near else ""
            return f"{group}={choice}: no such option; {hint}options: {', '.join(options)}"
    return None


def _choices(override: Override) -> Iterable[Any]:
    if override.is_sweep_override():
        return override.sweep_string_iterator()
    value = override.value()
    return value if isinstance(value, list) else [value]


def _one_line(error: BaseException) -> str:
    """Shorten Hydra's message to one line that starts with the key, without its internals."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    keys = [line.removeprefix("full_key:").strip() for line in lines if "full_key:" in line]
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=")))
    return f"{keys[0]}: {text}" if keys and keys[0] else text or type(error).__name__
