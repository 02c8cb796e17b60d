"""The error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Token data is missing, damaged, unfit for the run or too small; the message is one line."""
