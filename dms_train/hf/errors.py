"""Errors of this package; each message is one line: what, where, how to fix."""

from __future__ import annotations


class HFError(ValueError):
    """Error of a file, model directory or architecture that cannot be used."""
