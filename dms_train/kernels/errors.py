"""Errors of the kernels."""

from __future__ import annotations


class KernelError(ValueError):
    """Unsupported device, shape or dtype of a kernel."""
