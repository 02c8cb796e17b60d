"""The report of several runs: one HTML page that loads nothing, and the same tables as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from importlib.util import find_spec

from dms_train.evaluation.analysis import tables
from dms_train.evaluation.analysis.charts import margin_chart, scaling_chart
from dms_train.evaluation.analysis.comparison import AVERAGE, PEAK, READS, VANILLA, Comparison
from dms_train.evaluation.analysis.tables import Table
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult
from dms_train.evaluation.scaling.store import Row

# Maximum number of chains of a run, and of characters of a chain, on a page.
_CHAINS, _TEXT = 400, 4000
_NOTES = (
    "KV reads are those of decoding, summed over the chains of a document; peak tokens are what "
    "its chains hold at the same time, each with its own prompt. Both are means over layers and KV "
    "heads, then over documents. A chain that is cut off counts as wrong. The budgets of a run "
    "come from the same chains, so their errors are correlated. Intervals are bootstrapped over "
    "documents. Lines are Pareto frontiers; margins interpolate them linearly."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } use:hover { stroke: #000 !important }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: .3rem 0 1.5rem }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem } th { cursor: pointer }
th, td { border-bottom: 1px solid #ddd; padding: .15rem .6rem; text-align: right; font-size: 13px }
th:first-child, td:first-child { text-align: left } pre { white-space: pre-wrap; text-align: left }
"""
_SCRIPT = """
document.querySelectorAll('th').forEach(head => head.addEventListener('click', () => {
  const body = head.closest('table').tBodies[0], column = head.cellIndex;
  const down = head.dataset.order = head.dataset.order === '1' ? '-1' : '1';
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const number = text => parseFloat(text.replace('[', ''));  // of an interval its lower end
  const rows = [...body.rows].sort((a, b) => {
    const x = value(a), y = value(b), p = number(x), q = number(y);
    return down * (isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q);
  });
  body.append(...rows);
}));
const opened = () => { const found = document.querySelector(location.hash || 'main');
  if (found && found.tagName === 'DETAILS') found.open = true; };
addEventListener('hashchange', opened); opened();
"""


def _all_tables(comparison: Comparison) -> list[Table]:
    return [
        tables.task_table(comparison),
        tables.method_table(comparison),
        *(tables.margin_table(comparison.margins(cost), cost.title) for cost in (READS, PEAK)),
        tables.budget_table(comparison),
        tables.run_table(comparison),
    ]


def markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown.

    Raises:
        EvaluationError: No run holds a chain.
    """
    _require_points(comparison)
    sections = ["# Evaluation", _NOTES]
    sections += [table.markdown() for table in _all_tables(comparison)]
    sections += ["## Published by the paper, not measured here"]
    sections += [table.markdown() for table in tables.published_tables()]
    return "\n\n".join(sections) + "\n"


def page(comparison: Comparison) -> str:
    """Return the whole page.

    Raises:
        EvaluationError: No run holds a chain.
    """
    _require_points(comparison)
    own = "".join(f"<div class='wide'>{table.html()}</div>" for table in _all_tables(comparison))
    known = "".join(
        f"<div class='wide'>{table.html()}</div>" for table in tables.published_tables()
    )
    lines = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        # a browser refuses to load anything for this page
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
        f"<title>Evaluation</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>Evaluation</h1><p>{_NOTES}</p>",
        f"<h2>Figures</h2><section>{''.join(svg for _, svg in figures(comparison))}</section>",
        f"<h2>Tables</h2>{own}",
        f"<h2>Published by the paper, not measured here</h2>{known}",
        f"<h2>Chains</h2>{''.join(_chains(result) for result in comparison.results)}",
        f"</main><script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _require_points(comparison: Comparison) -> None:
    if not comparison.points:
        raise EvaluationError("the runs hold no chains yet; let dms-eval finish a document")


def figures(comparison: Comparison, *, links: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the name of each figure and its SVG element.

    Args:
        comparison: Runs to compare.
        links: Link each point to the chains of its run on the same page.

    Raises:
        EvaluationError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise EvaluationError("a report needs matplotlib; pip install 'dms-train[eval]'")
    methods = comparison.methods
    for cost in (READS, PEAK):
        against = [m for m in comparison.margins(cost) if m.second == VANILLA]
        if any(m.value is not None for m in against):
            title = f"Margin over {cost.title} (form of Figure 1)"
            yield f"margin_{cost.name}", margin_chart(title, against, methods)
    for cost, figure in ((READS, 3), (PEAK, 4)):
        tasks = [*comparison.tasks, AVERAGE] if len(comparison.tasks) > 1 else comparison.tasks
        for task in tasks:
            marks = comparison.marks(task, cost)
            if marks:
                title = f"{task}: {cost.title} (form of Figure {figure})"
                name = re.sub(r"\W+", "_", f"{task}_{cost.name}".lower())
                yield name, scaling_chart(title, marks, cost, methods, links=links)


def _cell(cell: tables.Cell) -> str:
    value = f" data-value='{cell!r}'" if isinstance(cell, int | float) else ""
    return f"<td{value}>{html.escape(tables.shown(cell))}</td>"


def _chains(result: RunResult) -> str:
    rows = [row for chains in result.documents.values() for row in chains]
    more = f", the first {_CHAINS:,} of {len(rows):,}" if len(rows) > _CHAINS else ""
    files = ", ".join(str(folder / "chains") for folder in result.folders)
    head = "<th>document</th><th>chain</th><th>tokens</th><th>end</th><th>verdict</th><th>text</th>"
    if not result.header["publishable"]:  # the authors of the task ask not to publish its items
        rows = [{**row, "text": "(not shown)"} for row in rows]
    body = "".join(_chain(row) for row in rows[:_CHAINS])
    return (
        f"<details id='run-{result.header['config_hash'][:12]}'>"
        f"<summary>{html.escape(f'{result.title}, {result.label}')}{more}: "
        f"{html.escape(files)}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _chain(row: Row) -> str:
    text = row["text"]
    cut = text if len(text) <= _TEXT else f"{text[: _TEXT // 2]}\n[...]\n{text[-_TEXT // 2 :]}"
    cells = (row["document"], row["chain"], row["tokens"], row["finish_reason"], row["verdict"])
    answers = ", ".join("-" if answer is None else answer for answer in row["answers"])
    return (
        f"<tr>{''.join(map(_cell, cells))}<td><details><summary>{html.escape(answers)}</summary>"
        f"<pre>{html.escape(cut)}</pre></details></td></tr>"
    )
