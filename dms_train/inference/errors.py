"""Errors of inference."""

from __future__ import annotations


class InferenceError(ValueError):
    """A model, an option or a prompt that cannot be used; one line that names what to change."""
