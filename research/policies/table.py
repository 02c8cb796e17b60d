"""Tables of the measurements, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from research.policies.cases import DENSE

Row = Mapping[str, Any]
_TITLES = {
    "exam": ("Exam sheets", "solved [95 % interval]"),
    "stories": ("Stories", "KL, nats a token [95 % interval]"),
}
_BEGIN, _END = "<!-- begin {} -->", "<!-- end {} -->"


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return a table for each task, by its name; times are ratios to the dense model."""
    return {
        task: _table(task, [row for row in rows if row["task"] == task])
        for task in _TITLES
        if any(row["task"] == task for row in rows)
    }


def _table(task: str, rows: Sequence[Row]) -> str:
    (dense,) = (row["result"] for row in rows if row["method"] == DENSE)
    lines = [
        f"| method | CR | {_TITLES[task][1]} | reads a token | peak tokens | KiB | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        result = row["result"]
        value, low, high = result["quality"]
        lines.append(
            f"| `{row['method']}` | {row['cr']:g} | {value:.3f} [{low:.3f}, {high:.3f}] "
            f"| {result['reads']:.0f} | {result['peak_tokens']:.0f} | {result['bytes'] / 1024:.0f} "
            f"| {result['ms'] / dense['ms']:.1f} |"
        )
    return "\n".join(lines)


def titled(tables: Mapping[str, str]) -> str:
    """Return all tables with their titles."""
    return "\n\n".join(f"{_TITLES[task][0]}\n\n{table}" for task, table in tables.items())


def write_page(page: Path, tables: Mapping[str, str]) -> None:
    """Replace the text between the markers of each task.

    Raises:
        EvaluationError: The page has no such markers.
    """
    text = page.read_text(encoding="utf-8")
    for task, table in tables.items():
        begin, end = _BEGIN.format(task), _END.format(task)
        head, *rest = re.split(f"{re.escape(begin)}.*?{re.escape(end)}", text, flags=re.DOTALL)
        if len(rest) != 1:
            raise EvaluationError(f"{page}: needs {begin} and {end}, once each")
        text = f"{head}{begin}\n{table}\n{end}{rest[0]}"
    page.write_text(text, encoding="utf-8")
