"""Tables of a report, as rows of cells that a page and Markdown share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dms_train.evaluation.analysis.comparison import Comparison, Margin, accuracy_cells
from dms_train.evaluation.analysis.published import SOURCE, published
from dms_train.tables import html_table, markdown_table

Cell = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a caption.

    Attributes:
        caption: Title.
        columns: Titles.
        rows: Cells; None is absent.
    """

    caption: str
    columns: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        text = markdown_table(self.columns, (map(shown, row) for row in self.rows))
        return f"**{self.caption}**\n\n{text}"

    def html(self) -> str:
        """Return the table as HTML; numbers keep their values, so that a page can sort by them."""
        rows = (map(_sortable, row) for row in self.rows)
        return html_table(self.columns, rows, caption=self.caption)


def _sortable(cell: Cell) -> str | tuple[Cell, str]:
    return (cell, shown(cell)) if isinstance(cell, int | float) else shown(cell)


def shown(cell: Cell) -> str:
    """Return a cell as text."""
    if cell is None:
        return "NA"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.1f}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return cell


def budget_table(comparison: Comparison) -> Table:
    """Return every budget of every run."""
    rows: list[list[Cell]] = []
    for result, point in comparison.points:
        low, high = 100 * point.accuracy.low, 100 * point.accuracy.high
        rows.append(
            [
                *(result.title, result.method, result.label, str(point.budget)),
                *(100 * point.accuracy.value, f"[{low:.1f}, {high:.1f}]"),
                *(100 * point.chain_accuracy, 100 * point.pass_at_w),
                *(point.kv_reads, point.peak_tokens, point.peak_tokens_shared),
                *(point.prefill_reads, point.tokens, 100 * point.truncated, point.documents),
            ]
        )
    return Table(
        caption="All budgets; accuracies in percent, costs of a document",
        columns=[
            *("task", "method", "run", "L-W-CR", "accuracy", "95 % interval", "one chain"),
            *("pass@W", "KV reads", "peak tokens", "with a shared prompt", "prefill reads"),
            *("tokens of a chain", "cut off, %", "documents"),
        ],
        rows=rows,
    )


def run_table(comparison: Comparison) -> Table:
    """Return wall time and memory, which depend on the machine."""
    rows: list[list[Cell]] = [
        [
            *(r.title, r.label, len(r.documents), "yes" if r.complete else "no"),
            *(r.seconds, r.peak_allocated_bytes, r.header["config"]["model"]["sha256"][:12]),
            r.header["config_hash"][:12],
        ]
        for r in comparison.results
    ]
    return Table(
        caption="Runs; wall time and bytes of the cache are measured, and depend on the machine",
        columns=[
            *("task", "run", "documents", "complete", "seconds", "cache bytes", "model"),
            "configuration",
        ],
        rows=rows,
    )


def task_table(comparison: Comparison) -> Table:
    """Return tasks by methods and ratios, one chain of the longest length (form of Table 1)."""
    cells = accuracy_cells(comparison)
    columns = sorted({key[1:] for key in cells}, key=lambda key: (key[1], key[0]))
    rows: list[list[Cell]] = [
        [task, *(_percent(cells.get((task, *column))) for column in columns)]
        for task in comparison.tasks
    ]
    return Table(
        caption="Form of Table 1: accuracy of one chain of the longest length, percent",
        columns=["task", *(_named(*column) for column in columns)],
        rows=rows,
    )


def method_table(comparison: Comparison) -> Table:
    """Return methods and ratios by tasks and contexts (form of Tables 2 and 3)."""
    cells = accuracy_cells(comparison)
    methods = sorted({key[1:] for key in cells}, key=lambda key: (key[1], key[0]))
    rows: list[list[Cell]] = [
        [_named(*method), *(_percent(cells.get((task, *method))) for task in comparison.tasks)]
        for method in methods
    ]
    return Table(
        caption="Form of Tables 2 and 3: accuracy of one chain of the longest length, percent",
        columns=["method", *comparison.tasks],
        rows=rows,
    )


def _percent(estimate: Any) -> Cell:
    return None if estimate is None else 100 * float(estimate.value)


def _named(method: str, cr: float) -> str:
    return method if cr == 1 else f"{method} {cr:.3g}x"


def margin_table(margins: Sequence[Margin], cost: str) -> Table:
    """Return margins of Pareto frontiers (form of Tables 5 and 6)."""
    rows: list[list[Cell]] = [
        [
            *(f"{m.first} vs {m.second}", m.task, m.value),
            None if m.interval is None else f"[{m.interval[0]:.1f}, {m.interval[1]:.1f}]",
        ]
        for m in margins
    ]
    return Table(
        caption=f"Margin of Pareto frontiers over {cost}, accuracy points (appendix E)",
        columns=["methods", "task", "margin", "95 % interval"],
        rows=rows,
    )


def published_tables() -> list[Table]:
    """Return the tables that the paper prints, named as such."""
    return [
        Table(
            caption=f"Published, {name.replace('table', 'Table ')}: {table['caption']} ({SOURCE})",
            columns=["", *table["columns"]],
            rows=table["rows"],
        )
        for name, table in published().items()
    ]
