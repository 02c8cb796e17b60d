"""Types of the arguments of the lab's commands."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from dms_train.evaluation.errors import EvaluationError

Value = TypeVar("Value")


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _number(text, 1)


def duration(text: str) -> float:
    """Parse seconds, 0 or more."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def seed(text: str) -> int:
    """Parse a whole number of at least 0."""
    return _number(text, 0)


def picture(text: str) -> Path:
    """Parse the name of a file that matplotlib can write."""
    path = Path(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: give a name that ends in .svg or .png")
    return path


def choice(names: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of one of some names."""

    def chosen(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(names)}")
        return text

    return chosen


def list_of(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Return a parser of different values between commas."""

    def parsed(text: str) -> tuple[Value, ...]:
        values = tuple(kind(part) for part in text.split(",") if part)
        if not values:
            raise argparse.ArgumentTypeError("nothing is named")
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text}: a value is repeated")
        return values

    return parsed


def named_models(text: str) -> dict[str, Path]:
    """Parse directories by name, given as `NAME=DIRECTORY,...`."""
    models: dict[str, Path] = {}
    for part in list_of(str)(text):
        name, _, path = part.partition("=")
        if not name or not path:
            raise argparse.ArgumentTypeError(f"{part!r}: give NAME=DIRECTORY")
        if name in models:
            raise argparse.ArgumentTypeError(f"{text}: a name is repeated")
        models[name] = Path(path)
    return models


def require_models_or_table(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one line unless there are models to measure, or only a stored record to show."""
    if (args.models is None) == (args.table is None):
        parser.error("give --models, or --table with a stored record")
    if args.table is None:
        return
    if args.overrides:
        parser.error("--table: a stored record takes no options of dms-eval; leave them out")
    for name, value in vars(args).items():
        if name not in ("table", "figure", "overrides") and value != parser.get_default(name):
            option = "--" + name.replace("_", "-")
            parser.error(f"{option}: --table only shows a stored record; leave it out")


def check_overrides(words: Iterable[str], own: Iterable[str], reason: str) -> None:
    """Refuse options of `dms-eval` that a command decides itself or does not read.

    Args:
        words: Options as `key=value`.
        own: Keys, or beginnings of keys that end in a dot.
        reason: End of the message.

    Raises:
        EvaluationError: One of the words has such a key, or the name of its group.
    """
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if any(key.startswith(each) or each.startswith(f"{key}.") for each in own):
            raise EvaluationError(f"{word}: {reason}; leave it out")


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
