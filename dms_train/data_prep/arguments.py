"""Parsers of option values that several `dms-data` commands share."""

from __future__ import annotations

import argparse

from dms_train.data.origins import UNKNOWN, Terms


def count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: The number is smaller than 1.
        ValueError: The text is not a whole number.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def add_terms(parser: argparse.ArgumentParser) -> None:
    """Add `--source` and `--license` to a command that makes a shard."""
    add = parser.add_argument
    add(
        "--source",
        default=UNKNOWN,
        metavar="NAME",
        help="name or address of the text's source, for the model card (%(default)s)",
    )
    add(
        "--license",
        default=UNKNOWN,
        metavar="ID",
        help="licence of the text, such as CC-BY-4.0, for the model card (%(default)s)",
    )


def terms_of(args: argparse.Namespace, model: str | None = None) -> Terms:
    """Return the terms that the arguments of `add_terms` state.

    Args:
        args: Parsed arguments.
        model: Name of the model that writes the text; None for text from elsewhere.
    """
    return Terms(source=args.source, license=args.license, model=model)
