"""Writes measured training steps into docs/performance/training_step.md.

    python -m benchmarks.train_step.page

Reads `train_step.json`; the text between the markers of the page is replaced. Nothing is measured
here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT, measured_at, write_page
from benchmarks.train_step import __main__ as train_step
from benchmarks.train_step import projection as train_step_projection
from benchmarks.train_step.shapes import KINDS, SHAPES, SUBJECTS, Case
from dms_train.cli.errors import run_main

PAGE = ROOT / "docs" / "performance" / "training_step.md"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="*", help="folders of devices (default: all, the newest first)"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(arguments)
    return run_main(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    folders = args.results or [file.parent for file in RESULTS.glob("*/train_step.json")]
    records = [json.loads((folder / "train_step.json").read_text()) for folder in folders]
    if not args.results:
        records.sort(key=_newest, reverse=True)
    write_page(args.page, "\n\n".join("\n".join(page_lines(record)) for record in records))


def _newest(record: dict[str, Any]) -> str:
    return max(str(row.get("run", "")) for row in record["rows"])


def page_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield the section of a device."""
    rows = sorted((row for row in record["rows"] if "failed" not in row), key=_place)
    known: dict[str, str] = {}
    for row in rows:
        known |= row["versions"]
    yield f"## {record['device']}\n"
    yield "Versions: " + ", ".join(f"{k} {v}" for k, v in known.items()) + "."
    runs = {row["run"]: measured_at(row) for row in rows if "run" in row}
    numbers = {run: str(number) for number, run in enumerate(sorted(runs), 1)}
    began = [f"{number} began {run} ({runs[run]})" for run, number in numbers.items()]
    if any("run" not in row for row in rows):
        began.append("? has no recorded time")
    yield "In brackets the 20 % and 80 % quantiles. `run` is the command that measured a row:"
    yield ", ".join(began) + ".\n"
    yield train_step.HEAD[0] + " run |"
    yield train_step.HEAD[1] + "---|"
    yield from (f"{train_step.line(row)} {numbers.get(row.get('run'), '?')} |" for row in rows)
    yield ""
    yield from (f"- {text}" for text in [*train_step.ratio_lines(rows), *scaling_lines(rows)])
    yield "\n### Kernel times of a step\n"
    yield from _kinds(rows)
    projected = list(train_step_projection.lines(rows))
    if projected:
        yield "\n### Projected: Qwen2.5-32B on 256 GPUs\n"
        yield from projected


def _place(row: dict[str, Any]) -> tuple[int | str, ...]:
    """Sort key: equal work in neighbouring rows, the peer before ours."""
    case = Case.from_dict(row["case"])
    return (
        list(SHAPES).index(case.shape),
        case.layout.world,
        case.layout.label,
        KINDS.index(case.kind),
        SUBJECTS.index(case.subject),
        case.layers,
        case.cuda_graph,
    )


def scaling_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Tokens per second and GPU of several copies over the best of one GPU in the same case."""
    best: dict[tuple[str, str], float] = {}
    copies = []
    for row in rows:
        case = Case.from_dict(row["case"])
        if case.subject != "ours":
            continue
        key = case.shape, case.kind
        if case.layout.world == 1:
            best[key] = max(best.get(key, 0.0), row["tokens_per_s_gpu"])
        elif case.layout.world == case.layout.dp:
            copies.append((key, case.layout.dp, row["tokens_per_s_gpu"]))
    for key, dp, each in copies:
        if key in best:
            share = each / best[key]
            yield f"{key[0]} {key[1]}: DP {dp} reaches {share:.3f} of one GPU's fastest on each"


def _kinds(rows: list[dict[str, Any]]) -> Iterator[str]:
    taken = [row for row in rows if "profile" in row]
    kinds: dict[str, None] = {}
    for row in taken:
        kinds |= dict.fromkeys(row["profile"]["kinds"])
    yield "| milliseconds of kernels | busy | of the step | " + " | ".join(kinds) + " |"
    yield "|---|" + "---|" * (len(kinds) + 2)
    for row in taken:
        case, found = Case.from_dict(row["case"]), row["profile"]
        cells = [f"{found['kinds'].get(kind, 0.0):.1f}" for kind in kinds]
        name = f"{case.shape} {case.layout.label}, {row['label']}"
        busy, share = found["busy_ms"], found["busy_ms"] / row["step_s"] / 1e3
        yield f"| {name} | {busy:.1f} | {share:.0%} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
