"""Error class of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Token data is missing, damaged, unsuitable or too small; the message is one line."""
