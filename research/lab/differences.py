"""Compare one chain of retrofitted models with one of the teacher, over the seeds of a lab.

    python -m research lab-differences outputs/lab/s

prints accuracy points for each length and compression ratio: the mean of the seeds with a 95 %
interval over the problems, and the minimum and maximum of the seeds. The accuracy of a chain is
estimated from all chains of a problem. In an evaluation that was stopped, only the problems before
the first missing one count, because problems that finish early are easier.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult, load
from dms_train.tables import markdown_table

_RETROFIT = re.compile(r"seed(\d+)_cr(\d+)")
Scores = dict[str, float]  # scores of one chain, by document


def retrofits(folder: Path) -> dict[int, list[RunResult]]:
    """Load the runs on Countdown by compression ratio, one run for each seed."""
    runs: dict[int, list[RunResult]] = {}
    for path in sorted((folder / "eval").glob("seed*_cr*")):
        if name := _RETROFIT.fullmatch(path.name):
            runs.setdefault(int(name[2]), []).append(load([path]))
    return dict(sorted(runs.items()))


def chain_scores(run: RunResult, index: int) -> Scores:
    """Estimate the score of one chain of the documents before the first missing one.

    Args:
        run: Run whose documents are numbered from 0.
        index: Index of the length in the sweep.
    """
    scores = {
        document: measure.pass_at_w
        for document, measure in zip(run.documents, run.measures(index, 1), strict=True)
    }
    whole = next(n for n in range(len(scores) + 1) if str(n) not in scores)
    return {str(n): scores[str(n)] for n in range(whole)}


def difference(seeds: Sequence[Scores], teacher: Scores) -> tuple[Estimate, list[float]]:
    """Return the difference from the teacher in points: of all seeds together, and of each."""
    return over_seeds(
        [{d: 100 * (own[d] - teacher[d]) for d in own if d in teacher} for own in seeds]
    )


def over_seeds(seeds: Sequence[Scores]) -> tuple[Estimate, list[float]]:
    """Return the mean score of all seeds together, and of each seed.

    The value of a problem is the mean over the seeds that have it; problems are resampled.
    """
    problems = sorted(set().union(*seeds))
    means = [statistics.mean(own[d] for own in seeds if d in own) for d in problems]
    each = [statistics.mean(own.values()) for own in seeds]
    return ratio(means, [1.0] * len(means)), each


def table(teacher: RunResult, runs: Mapping[int, Sequence[RunResult]]) -> str:
    """Return Markdown with a line for each length and a column for each ratio."""
    rows = []
    for index, length in enumerate(teacher.header["config"]["sweep"]["lengths"]):
        base, cells = chain_scores(teacher, index), []
        for seeds in runs.values():
            mean, each = difference([chain_scores(run, index) for run in seeds], base)
            cells.append(
                f"{mean.value:+.1f} [{mean.low:+.1f}, {mean.high:+.1f}], "
                f"{min(each):+.1f} to {max(each):+.1f}"
            )
        rows.append([f"{round(1024 * length):,}", *cells])
    return markdown_table(["tokens of the chain", *(f"CR {cr}" for cr in runs)], rows)


def _run(folder: Path) -> int:
    if not (folder / "eval" / "teacher").is_dir():
        raise EvaluationError(f"{folder}: no folder of a lab that has evaluated its teacher")
    teacher, runs = load([folder / "eval" / "teacher"]), retrofits(folder)
    if not runs:
        raise EvaluationError(f"{folder / 'eval'}: no retrofitted model has been evaluated")
    for run in (teacher, *(run for seeds in runs.values() for run in seeds)):
        if not chain_scores(run, 0):
            raise EvaluationError(f"{run.folders[0]}: its first problem has not been evaluated")
    print(table(teacher, runs))
    for cr, seeds in runs.items():
        counts = ", ".join(f"{len(chain_scores(run, 0)):,}" for run in seeds)
        print(f"CR {cr}: problems of each seed: {counts}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research lab-differences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of a lab on Countdown")
    return run_main(lambda: _run(parser.parse_args(arguments).folder))
