"""Page of measured training steps.

    python -m benchmarks page train_step

Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, measured_at, stored_records, write_page
from benchmarks.tables import Column, table
from benchmarks.train_step import projection as train_step_projection
from benchmarks.train_step.shapes import KINDS, SHAPES, SUBJECTS, Case
from benchmarks.train_step.tables import COLUMNS, ratio_lines

PAGE = ROOT / "docs" / "performance" / "training_step.md"


def write(results: Path, page: Path) -> None:
    """Write the records of all GPUs between the markers of a page, the newest first."""
    records = stored_records(results, "train_step.json")
    write_page(page, "\n\n".join("\n".join(page_lines(record)) for record in records))


def page_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield the section of a device."""
    rows = sorted((row for row in record["rows"] if "failed" not in row), key=_sort_key)
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
    run: Column = ("run", lambda row: numbers.get(row.get("run"), "?"))
    yield from table([*COLUMNS, run], rows).splitlines()
    yield ""
    yield from (f"- {text}" for text in [*ratio_lines(rows), *scaling_lines(rows)])
    yield "\n### Kernel times of a step\n"
    yield _kinds(rows)
    projected = list(train_step_projection.lines(rows))
    if projected:
        yield "\n### Projected: Qwen2.5-32B on 256 GPUs\n"
        yield from projected


def _sort_key(row: dict[str, Any]) -> tuple[int | str, ...]:
    """Return the sort key: equal work in neighbouring rows, the peer before ours."""
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
    """Yield tokens/s/GPU of several copies over the best of one GPU in the same case."""
    best: dict[tuple[str, str, str, str, bool], float] = {}
    copies = []
    for row in rows:
        case = Case.from_dict(row["case"])
        if case.subject != "ours":
            continue
        key = case.shape, case.kind, case.trains, case.layers, case.fp8
        if case.layout.world == 1:
            best[key] = max(best.get(key, 0.0), row["tokens_per_s_gpu"])
        elif case.layout.world == case.layout.dp:
            eager = ", eager" * (case.cuda_graph == "never")
            copies.append((key, f"DP {case.layout.dp}{eager}", row["tokens_per_s_gpu"]))
    for key, layout, each in copies:
        if key in best:
            share = each / best[key]
            yield f"{key[0]} {key[1]}: {layout} reaches {share:.3f} of one GPU's fastest on each"


def _kinds(rows: list[dict[str, Any]]) -> str:
    taken = [row for row in rows if "profile" in row]
    kinds = dict.fromkeys(kind for row in taken for kind in row["profile"]["kinds"])

    def ms(kind: str) -> Column:
        return kind, lambda row: f"{row['profile']['kinds'].get(kind, 0.0):.1f}"

    columns: list[Column] = [
        ("milliseconds of kernels", _name),
        ("busy", lambda row: f"{row['profile']['busy_ms']:.1f}"),
        ("of the step", lambda row: f"{row['profile']['busy_ms'] / row['step_s'] / 1e3:.0%}"),
    ]
    return table([*columns, *map(ms, kinds)], taken)


def _name(row: dict[str, Any]) -> str:
    case = Case.from_dict(row["case"])
    return f"{case.shape} {case.layout.label}, {row['label']}"
