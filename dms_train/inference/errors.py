"""Errors of inference."""

from __future__ import annotations


class InferenceError(ValueError):
    """Error of a model, an option or a prompt that cannot be used; its line says what to change."""
