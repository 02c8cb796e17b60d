"""Errors of the training loop, each one line: what, where, how to fix."""

from __future__ import annotations


class DivergenceError(ValueError):
    """Too many steps in a row without a finite loss and gradient; checkpoints are untouched."""
