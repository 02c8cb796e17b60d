"""Errors of this package; each message is one line: what, where, how to fix."""

from __future__ import annotations


class EvaluationError(ValueError):
    """Unusable input of an evaluation, or a result that must not pass; one line."""
