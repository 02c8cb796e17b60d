"""Columns of benchmark tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dms_train.tables import markdown_table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], object]]  # title, and content for a row


def table(columns: Sequence[Column], rows: Iterable[Row], names: int | None = 1) -> str:
    """Return a Markdown table with one line for each row.

    Args:
        columns: Titles and contents.
        rows: Measurements. A row with `skipped` or `failed` shows this reason after its names.
        names: Number of leading columns that name a row; None if the columns show the reason.
    """

    def cells(row: Row) -> list[object]:
        reason = row.get("skipped") or row.get("failed")
        if reason is None or names is None:
            return [content(row) for _, content in columns]
        return [*(content(row) for _, content in columns[:names]), reason]

    return markdown_table([title for title, _ in columns], map(cells, rows))


def field(name: str, form: str = "", scale: float = 1) -> Callable[[Row], str]:
    """Return the content of a column that shows one field.

    Args:
        name: Field; empty where a row lacks it.
        form: Format of the value.
        scale: Factor of a number.
    """

    def content(row: Row) -> str:
        value = row.get(name)
        if value is None:
            return ""
        return format(value if scale == 1 else value * scale, form)

    return content


def spread(times: dict[str, float], digits: int = 3) -> str:
    """Return a median with the 20 % and 80 % quantiles."""
    low, high = (f"{times[name]:.{digits}f}" for name in ("low", "high"))
    return f"{times['median']:.{digits}f} [{low}, {high}]"
