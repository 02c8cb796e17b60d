"""Errors of the kernels."""

from __future__ import annotations


class KernelError(ValueError):
    """A backend that cannot run on this device, or a shape or dtype that no backend supports."""
