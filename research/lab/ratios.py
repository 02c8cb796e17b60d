"""Compare methods at the same compression ratios, over the seeds of a lab.

    python -m research lab-ratios outputs/lab/recall --figure ratios.svg

prints a table for each task of short answers. A cell has the share of right answers over all seeds
with a 95 % interval over the problems, and the minimum and maximum of the seeds. It also has the
peak tokens of a KV head, the mean over the problems. Policies are not trained and have no seeds;
they run on the teacher with as many tokens as DMS of the first seed holds. All rows use problems
that every run has evaluated. The figure has the shares with their intervals, a panel for each task.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.cli.errors import run_main
from dms_train.evaluation.analysis.charts import color
from dms_train.evaluation.bootstrap import Estimate
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult, load
from dms_train.tables import markdown_table
from research.lab.arguments import picture
from research.lab.differences import chain_scores, over_seeds
from research.lab.scales import SCALES
from research.lab.tasks import TASKS

_RETROFIT = re.compile(r"seed\d+_(?:([a-z_]+)_)?cr(\d+)")
_POLICY = re.compile(r"(\w+)_as_cr(\d+)")
_METHODS = (("", "DMS"), *((name, name.upper()) for name in SCALES["recall"].methods[1:]))
_ORIGINAL = "original"
Runs = dict[tuple[str, int], list[RunResult]]  # one for each seed, by method and ratio


class Cell(NamedTuple):
    """Result of a method at a ratio.

    Attributes:
        right: Share of the problems, the mean of the seeds.
        seeds: Share of each seed.
        tokens: Peak tokens of a KV head, the mean over the problems.
    """

    right: Estimate
    seeds: list[float]
    tokens: float

    def __str__(self) -> str:
        """Return text such as `0.993 [0.985, 0.998], 0.990 to 0.995; 101`."""
        value, low, high = self.right.value, self.right.low, self.right.high
        least, most = min(self.seeds), max(self.seeds)
        spread = f", {least:.3f} to {most:.3f}" if len(self.seeds) > 1 else ""
        return f"{value:.3f} [{low:.3f}, {high:.3f}]{spread}; {self.tokens:,.0f}"


class Table(NamedTuple):
    """Results on a task.

    Attributes:
        title: Title of the task, with the number of problems.
        ratios: Compression ratios, ascending.
        rows: By method, in their order, and ratio; the original model has ratio 1.
    """

    title: str
    ratios: list[int]
    rows: dict[str, dict[int, Cell]]


def runs_of(folder: Path, task: str) -> tuple[RunResult | None, Runs]:
    """Load all evaluations of a lab on a task.

    Args:
        folder: Folder of the lab.
        task: Name in `TASKS` of a task of short answers.

    Returns:
        The teacher, if it was evaluated; and retrofits (under the names in `_METHODS`) and policies
        (under theirs).
    """
    runs: Runs = {}
    suffix = f"_{task}"
    paths = sorted(path.parent for path in (folder / "eval").glob(f"*{suffix}/summary.json"))
    named = {path.name.removesuffix(suffix): path for path in paths}
    titles = dict(_METHODS)
    for name, path in named.items():
        match = _POLICY.fullmatch(name)
        method = match[1] if match else None
        if match is None and (match := _RETROFIT.fullmatch(name)):
            method = titles.get(match[1] or "")
        if match and method:
            runs.setdefault((method, int(match[2])), []).append(load([path]))
    return (load([named["teacher"]]) if "teacher" in named else None), runs


def cell(runs: Sequence[RunResult], problems: Collection[str]) -> Cell:
    """Combine the runs of a method at a ratio, one for each seed."""
    scores = [chain_scores(run, 0) for run in runs]
    mean, each = over_seeds([{name: own[name] for name in problems} for own in scores])
    tokens = statistics.mean(
        measure.peak_tokens
        for run in runs
        for name, measure in zip(run.documents, run.measures(0, 1), strict=True)
        if name in problems
    )
    return Cell(mean, each, tokens)


def common_problems(teacher: RunResult, retrofits: Runs) -> list[str]:
    """Return the problems that every run has evaluated.

    Raises:
        EvaluationError: There is none.
    """
    every = [teacher, *(run for runs in retrofits.values() for run in runs)]
    names = set.intersection(*(set(chain_scores(run, 0)) for run in every))
    if not names:
        raise EvaluationError(f"{teacher.folders[0]}: no problem has been evaluated by every run")
    return sorted(names)


def table(teacher: RunResult, retrofits: Runs) -> Table:
    """Compute all methods at all ratios, over the problems that every run has evaluated.

    Raises:
        EvaluationError: There is none.
    """
    problems = common_problems(teacher, retrofits)
    present = {name for name, _ in retrofits}
    trained = [title for _, title in _METHODS if title in present]
    rows = {_ORIGINAL: {1: cell([teacher], problems)}}
    for name in [*trained, *sorted(present.difference(trained))]:
        own = {cr: runs for (method, cr), runs in sorted(retrofits.items()) if method == name}
        rows[name] = {cr: cell(runs, problems) for cr, runs in own.items()}
    title = f"{teacher.title}, {len(problems)} problems"
    return Table(title, sorted({cr for _, cr in retrofits}), rows)


def markdown(shown: Table) -> str:
    """Return a line for each method and a column for each ratio; the original is in the first."""
    rows = []
    for name, row in shown.rows.items():
        columns = [1, *shown.ratios[1:]] if name == _ORIGINAL else shown.ratios
        rows.append([name, *(row.get(cr, "") for cr in columns)])
    return markdown_table(["", *(f"CR {cr}" for cr in shown.ratios)], rows)


def drawn(tables: Sequence[Table]) -> Any:
    """Draw a panel for each task, with the methods as lines over the ratios."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(tables) + 1, 3), layout="constrained")
    FigureCanvasAgg(figure)
    methods = [name for shown in tables for name in shown.rows if name != _ORIGINAL]
    methods = list(dict.fromkeys(methods))
    for column, shown in enumerate(tables):
        axes = figure.add_subplot(1, len(tables), column + 1)
        axes.axhline(shown.rows[_ORIGINAL][1].right.value, color="gray", ls="--", label=_ORIGINAL)
        for name in methods:
            row = shown.rows.get(name, {})
            right = [each.right for each in row.values()]
            error = [[x.value - x.low for x in right], [x.high - x.value for x in right]]
            paint = color(name, methods)
            values = [x.value for x in right]
            axes.errorbar(list(row), values, error, label=name, color=paint, marker="o", ms=3)
        axes.set(title=shown.title, xlabel="CR", xticks=shown.ratios, ylim=(-0.03, 1.03))
    figure.axes[0].set_ylabel("share of the problems that are right")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _run(folder: Path, figure: Path | None) -> int:
    tables = []
    for task in (name for name, task in TASKS.items() if not task.searches):
        teacher, runs = runs_of(folder, task)
        if teacher is not None and runs:
            tables.append(table(teacher, runs))
            print("\n".join(["", tables[-1].title, "", markdown(tables[-1])]))
    if not tables:
        raise EvaluationError(f"{folder}: no folder of a lab that has evaluated its teacher")
    if figure is not None:
        drawn(tables).savefig(figure)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research lab-ratios",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of a lab with tasks of short answers")
    parser.add_argument("--figure", type=picture, help=".svg or .png file to write")
    return run_main(lambda: _run(**vars(parser.parse_args(arguments))))
