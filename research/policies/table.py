"""Tables of the measurements, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dms_train.tables import markdown_table
from research.policies.cases import DENSE

Row = Mapping[str, Any]
_TITLES = {
    "exam": ("Exam sheets", "solved [95 % interval]"),
    "stories": ("Stories", "KL, nats a token [95 % interval]"),
}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return a table for each task, by its name; times are ratios to the dense model."""
    return {
        task: _table(task, [row for row in rows if row["task"] == task])
        for task in _TITLES
        if any(row["task"] == task for row in rows)
    }


def _table(task: str, rows: Sequence[Row]) -> str:
    (dense,) = (row["result"] for row in rows if row["method"] == DENSE)
    quality = _TITLES[task][1]
    header = ["method", "CR", quality, "reads a token", "peak tokens", "KiB", "time"]
    return markdown_table(header, [_cells(row, dense["ms"]) for row in rows])


def _cells(row: Row, dense_ms: float) -> list[str]:
    result = row["result"]
    value, low, high = result["quality"]
    costs = result["reads"], result["peak_tokens"], result["bytes"] / 1024
    return [
        f"`{row['method']}`",
        f"{row['cr']:g}",
        f"{value:.3f} [{low:.3f}, {high:.3f}]",
        *(f"{cost:.0f}" for cost in costs),
        f"{result['ms'] / dense_ms:.1f}",
    ]


def titled(tables: Mapping[str, str]) -> str:
    """Return all tables with their titles."""
    return "\n\n".join(f"{_TITLES[task][0]}\n\n{table}" for task, table in tables.items())
