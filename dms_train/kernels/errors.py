"""Refusals of this room, each one line: what, where, how to fix."""

from __future__ import annotations


class KernelError(ValueError):
    """A backend that cannot run here, or a problem that no backend takes."""
