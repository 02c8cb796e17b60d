"""Types of the words of a task's texts: one module for each task."""

from __future__ import annotations

from research.retention.grammars import countdown
from research.retention.grammars.base import Grammar

GRAMMARS: dict[str, Grammar] = {"countdown": countdown.GRAMMAR}
