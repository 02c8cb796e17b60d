"""Errors of this package; each message is one line: what, where, how to fix."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used."""


class DamagedError(CheckpointError):
    """A checkpoint that was not finished or has changed since; an older one may do."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written, the same on every rank; older ones are untouched."""


class ModelError(ValueError):
    """Weights or an architecture that cannot be built."""
