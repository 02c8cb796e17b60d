"""Methods beside each other at the same compression ratios, over the seeds of a lab.

    python -m benchmarks.lab.ratios outputs/lab/recall

prints a table for each task of short answers: the share that is right with a 95 % interval over the
problems, of all seeds together, the least and the most of a seed, and the tokens that a KV head
holds at most, the mean over the problems. Policies are not trained and have no seeds; they are run
on the teacher with as many tokens as DMS of the first seed holds. All rows are over the problems
that every run has evaluated.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.lab.differences import chain_scores, over_seeds
from benchmarks.lab.scales import SCALES
from benchmarks.lab.tasks import TASKS
from dms_train.cli.errors import run_main
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult, load

_RETROFIT = re.compile(r"seed\d+_(?:([a-z_]+)_)?cr(\d+)")
_POLICY = re.compile(r"(\w+)_as_cr(\d+)")
_METHODS = (("", "DMS"), *((name, name.upper()) for name in SCALES["recall"].methods[1:]))
Runs = dict[tuple[str, int], list[RunResult]]  # one for each seed, by method and ratio


def runs_of(folder: Path, task: str) -> tuple[RunResult | None, Runs]:
    """What a lab has evaluated on a task.

    Args:
        folder: Of the lab.
        task: Of `TASKS`, of short answers.

    Returns:
        The teacher, if it was evaluated; and retrofits (under the names in `_METHODS`) and policies
        (under theirs).
    """
    found: Runs = {}
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
            found.setdefault((method, int(match[2])), []).append(load([path]))
    return (load([named["teacher"]]) if "teacher" in named else None), found


def cell(runs: Sequence[RunResult], problems: Collection[str]) -> str:
    """`0.993 [0.985, 0.998], 0.990 to 0.995; 101`."""
    scores = [chain_scores(run, 0) for run in runs]
    mean, each = over_seeds([{name: own[name] for name in problems} for own in scores])
    spread = f", {min(each):.3f} to {max(each):.3f}" if len(each) > 1 else ""
    tokens = statistics.mean(
        measure.peak_tokens
        for run in runs
        for name, measure in zip(run.documents, run.measures(0, 1), strict=True)
        if name in problems
    )
    return f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]{spread}; {tokens:,.0f}"


def common_problems(teacher: RunResult, found: Runs) -> list[str]:
    """Those that every run has evaluated.

    Raises:
        EvaluationError: There is none.
    """
    every = [teacher, *(run for runs in found.values() for run in runs)]
    names = set.intersection(*(set(chain_scores(run, 0)) for run in every))
    if not names:
        raise EvaluationError(f"{teacher.folders[0]}: no problem has been evaluated by every run")
    return sorted(names)


def table(teacher: RunResult, found: Runs, problems: Collection[str]) -> list[str]:
    """Markdown, a line for each method and a column for each ratio."""
    ratios = sorted({cr for _, cr in found})
    present = {name for name, _ in found}
    trained = [title for _, title in _METHODS if title in present]
    names = [*trained, *sorted(present.difference(trained))]
    lines = [
        "| | " + " | ".join(f"CR {cr}" for cr in ratios) + " |",
        "|---" * (len(ratios) + 1) + "|",
        f"| original | {cell([teacher], problems)} |" + " |" * (len(ratios) - 1),
    ]
    for name in names:
        runs = [found.get((name, cr)) for cr in ratios]
        cells = ["" if each is None else cell(each, problems) for each in runs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _run(folder: Path) -> int:
    shown = 0
    for task in (name for name, task in TASKS.items() if not task.searches):
        teacher, found = runs_of(folder, task)
        if teacher is None or not found:
            continue
        problems = common_problems(teacher, found)
        print(f"\n{teacher.title}, {len(problems)} problems\n")
        print("\n".join(table(teacher, found, problems)))
        shown += 1
    if not shown:
        raise EvaluationError(f"{folder}: no folder of a lab that has evaluated its teacher")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.lab.ratios",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of a lab with tasks of short answers")
    return run_main(lambda: _run(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    raise SystemExit(main())
