r"""Compare all cache policies at every compression ratio, on exam sheets and on stories.

    for cr in 2 3 4; do
        make demo CR=$cr OUT=outputs/dms$cr
        make demo CR=$cr OUT=outputs/dmc$cr METHOD=dmc
    done
    python -m research policies --exam-export outputs/dm?[234]/hf \
        --stories-model stories260k-hf --stories stories.jsonl --page docs/methods.md

The embedded teacher answers sheets greedily, and stories are given to the model that wrote them.
Every measured row goes to `--results`, and the same command continues there. Remove the line of a
row whose time was disturbed to measure it again. At the end the tables are printed, and written
into `--page`. Times are CPU times, because other work on the machine affects them less than wall
time; run it on an idle machine all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.records import origin, write_page
from dms_train.cli.config_source import ASSETS_DIR
from dms_train.cli.errors import run_main
from dms_train.data_prep.progress import progress_bar
from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.policies.registry import policy_names
from research.policies.cases import DENSE, Case, cases
from research.policies.exam import ExamTask
from research.policies.stories import StoriesTask
from research.policies.table import Row, tables, titled


class Task(Protocol):
    """Measurement of a case."""

    name: str

    def settings(self) -> dict[str, Any]:
        """Return the values that a result depends on, besides the case."""
        ...

    def measure(self, case: Case) -> Mapping[str, Any]:
        """Measure a case."""
        ...


def _key(task: Task, case: Case) -> dict[str, Any]:
    """Return the fields of a row without its result; they distinguish rows of other settings."""
    return {
        "task": task.name,
        "method": case.method,
        "cr": case.cr,
        "options": case.options,
        "settings": task.settings(),
    }


def measure(plan: list[tuple[Task, Case]], file: Path) -> list[Row]:
    """Measure the cases without a row in `file`; return all rows in the order of the plan."""
    rows, measured_rows, measured = _rows(file), list[Row](), origin()
    with progress_bar(len(plan)) as advance, file.open("a", encoding="utf-8") as output:
        for task, case in plan:
            advance(0, f"{task.name}: {case.method} CR {case.cr:g}")
            key = _key(task, case)
            row: Row | None = next((r for r in rows if key.items() <= r.items()), None)
            if row is None:
                row = key | {"result": task.measure(case)} | measured
                output.write(json.dumps(row) + "\n")
                output.flush()
            measured_rows.append(row)
            advance(1, "")
    return measured_rows


def _rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of earlier calls; create the file if it is absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    lines = file.read_text(encoding="utf-8").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise EvaluationError(
            f"{file}: a damaged line ({error}); remove it, the rest is kept"
        ) from None


def _plan(args: argparse.Namespace) -> list[tuple[Task, Case]]:
    exam = ExamTask(model=args.exam_model, sheets=args.sheets)
    plan: list[tuple[Task, Case]] = [(exam, case) for case in _cases(args, args.exam_export)]
    missing = [path for path in (args.stories_model, args.stories) if not path or not path.exists()]
    if missing:
        print("stories are left out: give --stories-model and --stories", file=sys.stderr)
        return plan
    stories = StoriesTask(model=args.stories_model, file=args.stories, stories=args.texts)
    return plan + [(stories, case) for case in _cases(args, args.stories_export)]


def _cases(args: argparse.Namespace, exports: list[Path]) -> list[Case]:
    """Return the cases of `--methods`, and the dense model."""
    every_case = cases(args.cr, exports)
    return [c for c in every_case if not args.methods or c.method in {DENSE, *args.methods}]


def _run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    by_task = tables(measure(_plan(args), args.results))
    print(titled(by_task))
    if args.page is not None:
        for task, text in by_task.items():
            write_page(args.page, text, task)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m research policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cr", type=float, nargs="+", default=[2.0, 3.0, 4.0], help="compression ratios")
    add("--methods", nargs="+", choices=policy_names(), metavar="METHOD", help="some only (all)")
    add("--exam-model", type=Path, default=ASSETS_DIR / "exam_teacher")
    add("--exam-export", type=Path, nargs="*", default=[], help="models trained on sheets")
    add("--sheets", type=int, default=ExamTask.sheets)
    add("--stories-model", type=Path, help="the model that wrote the stories")
    add("--stories", type=Path, help=".jsonl file of texts")
    add("--stories-export", type=Path, nargs="*", default=[], help="models trained on stories")
    add("--texts", type=int, default=StoriesTask.stories, help="stories to take")
    add("--results", type=Path, default=Path("outputs/policies.jsonl"), help="what was measured")
    add("--page", type=Path, help="Markdown page with markers to write the tables into")
    add("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))
