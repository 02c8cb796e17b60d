"""Errors of this package; each message is one line: what, where, how to fix."""

from __future__ import annotations


class EvaluationError(ValueError):
    """Input that cannot be evaluated, or a result that must not pass; one line."""
