"""Refusals of this room, each one line: what, where, how to fix."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used."""


class ModelError(ValueError):
    """Weights or an architecture this room cannot build."""


class DivergenceError(ValueError):
    """A loss or gradient norm that is not finite; checkpoints on disk are untouched."""
