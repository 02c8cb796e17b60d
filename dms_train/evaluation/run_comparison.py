"""Several run folders on one HTML page: a picture for each metric, with a curve for each run."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import yaml

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.html_page import figure, page, table
from dms_train.evaluation.plots import Curve, curves_of, draw_curves
from dms_train.evaluation.run_report import PANELS, RunRecord, drawn

_Runs = dict[str, dict[str, Curve]]


def compare(records: list[RunRecord]) -> str:
    """Return the whole page.

    Args:
        records: Runs, in the order of the columns. A run is called by its folder's name, or by the
            path where two folders have the same name.

    Raises:
        EvaluationError: A folder is given twice, a `config.yaml` is damaged, or matplotlib is not
            installed.
    """
    named = _named(records)
    runs = {name: curves_of(record.rows) for name, record in named.items()}
    parts = [
        f"<h2>Training curves</h2><section>{drawn(_pictures(runs))}</section>",
        f"<h2>Last values</h2>{_last_values(runs)}",
        f"<h2>Differences of the configurations</h2>{_differences(named)}",
    ]
    data = {name: record.rows for name, record in named.items()}
    return page(", ".join(named), parts, data)


def _named(records: list[RunRecord]) -> dict[str, RunRecord]:
    folders = [record.folder.resolve() for record in records]
    for folder in folders:
        if folders.count(folder) > 1:
            raise EvaluationError(f"{folder}: is given twice; give each run once")
    names = [folder.name for folder in folders]
    unique = len(set(names)) == len(names)
    return dict(zip(names if unique else map(str, folders), records, strict=True))


def _pictures(runs: _Runs) -> Iterator[str]:
    """Yield a picture of each metric that at least one run has."""
    for _, unit, metrics in PANELS:
        for metric in metrics:
            shown = {name: curves[metric] for name, curves in runs.items() if metric in curves}
            if shown:
                picture = BytesIO()
                draw_curves(shown, unit, metric, picture, metric)
                yield figure(picture, metric)


def _last_values(runs: _Runs) -> str:
    metrics = sorted({metric for curves in runs.values() for metric in curves})
    lines = (
        [metric, *(_last(curves.get(metric)) for curves in runs.values())] for metric in metrics
    )
    return table(["metric", *runs], lines)


def _last(curve: Curve | None) -> float | None:
    return curve[1][-1] if curve else None


def _differences(named: dict[str, RunRecord]) -> str:
    """Return a table of the keys whose values are not the same in all runs."""
    columns = [dict(_leaves(_configuration(record))) for record in named.values()]
    keys = dict.fromkeys(key for column in columns for key in column)
    lines = [[key, *(column.get(key, "") for column in columns)] for key in keys]
    return table(["key", *named], (line for line in lines if len(set(line[1:])) > 1))


def _configuration(record: RunRecord) -> Any:
    try:
        return yaml.safe_load(record.config)
    except yaml.YAMLError as error:
        cause = " ".join(str(error).split())
        raise EvaluationError(
            f"{record.folder / 'config.yaml'}: cannot be read ({cause}); restore or remove it"
        ) from error


def _leaves(block: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration, joined by dots, with their values as text."""
    if not isinstance(block, dict):
        yield prefix, "" if block is None else str(block)
        return
    for key, value in block.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
