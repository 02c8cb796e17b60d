"""Errors of the training loop, each one line: what, where, how to fix."""

from __future__ import annotations


class DivergenceError(ValueError):
    """Too many steps in a row without a finite loss and gradient; checkpoints are untouched."""


class KLLimitError(ValueError):
    """No ratio of the annealing has a KL within `stage.retrofit.max_kl`."""
