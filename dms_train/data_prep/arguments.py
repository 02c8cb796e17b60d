"""Values of command-line options that several commands of `dms-data` have."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: It is smaller.
        ValueError: It is no whole number.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
