"""Parsers of option values that several `dms-data` commands share."""

from __future__ import annotations

import argparse


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
