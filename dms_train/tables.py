"""Tables as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, without a newline at the end.

    Args:
        header: Column titles; an empty one stays empty.
        rows: Cells, written with `str`. A `|` inside a cell is escaped. A row with fewer cells than
            columns ends with empty cells.
    """
    titles = "".join(f" {_escaped(title)} |" if title else " |" for title in header)
    body = (_line([_escaped(cell) for cell in cells], len(header)) for cells in rows)
    return "\n".join([f"|{titles}", "|" + "---|" * len(header), *body])


def _line(cells: list[str], columns: int) -> str:
    return f"| {' | '.join(cells)} |" + " |" * (columns - len(cells))


def _escaped(cell: object) -> str:
    return str(cell).replace("|", "&#124;")


def html_table(header: Sequence[str], rows: Iterable[Iterable[object]], caption: str = "") -> str:
    """Return an HTML table.

    Args:
        header: Column titles.
        rows: Cells, written with `str` and escaped. A cell that is a pair `(value, text)` shows
            the text and stores the value as `data-value`, by which a script can sort.
        caption: Title of the table; empty for none.
    """
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_html_cell, cells))}</tr>" for cells in rows)
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_cell(cell: object) -> str:
    if isinstance(cell, tuple):
        value, text = cell
        return f"<td data-value='{value!r}'>{html.escape(text)}</td>"
    return f"<td>{html.escape(str(cell))}</td>"
