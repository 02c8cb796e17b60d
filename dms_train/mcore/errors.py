"""Errors of this package; each message is one line: what, where, how to fix."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Error of a checkpoint folder that cannot be used."""


class DamagedError(CheckpointError):
    """Error of an incomplete or changed checkpoint; an older one may be usable."""


class SaveError(CheckpointError):
    """Error of a checkpoint that cannot be written, the same on every rank; older ones stay."""


class ModelError(ValueError):
    """Error of weights or an architecture that cannot be built."""
