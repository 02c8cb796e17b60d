"""What this room refuses."""

from __future__ import annotations


class EvaluationError(ValueError):
    """Input that cannot be evaluated, or a result that must not pass; one line."""
