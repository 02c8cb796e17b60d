"""Tables of decode steps and prefill: vLLM, this engine without eviction, and with DMS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.records import measured_at
from benchmarks.tables import Column, field, table

Row = dict[str, Any]
PEERS = {"vLLM, FP8 cache": "fp8", "vLLM, bf16": "auto"}
OURS = {"dense": "dense", "DMS": "DMS", "DMS, FP8": "DMS, FP8 pages"}
COLUMNS = (*PEERS, *OURS)
FASTER = "faster vLLM"  # the faster one of both cache dtypes
# Gain of the engine, gain of DMS, and gain of both over the peer that users choose.
RATIOS = (
    ("dense", "vLLM, bf16"),
    ("DMS", "dense"),
    ("DMS", "vLLM, FP8 cache"),
    ("DMS", FASTER),
)


def tables(record: Row) -> str:
    """Return decode steps and prefill side by side, and every row with its spread."""
    rows = record["cases"]
    parts = (
        "Milliseconds of a decode step; ratios below 1 are faster:",
        side_by_side(rows, "step_ms"),
        "Prefill, tokens/s; ratios above 1 are faster:",
        side_by_side(rows, "prefill_tok_s"),
        every_row(rows),
    )
    return "\n\n".join(parts)


def side_by_side(rows: list[Row], value: str) -> str:
    """Return a row for each case, a column for each engine, `RATIOS`, and CR."""

    def engine(name: str) -> Column:
        return name, lambda case: _shown(best(case["rows"], name, value), value)

    def quotient(over: str, under: str) -> Column:
        return f"{over} / {under}", lambda case: ratio(case["rows"], over, under, value)

    cases = [
        {"shape": shape, "context": context, "sequences": sequences, "rows": mine}
        for (shape, context, sequences), mine in by_case(rows).items()
    ]
    columns: list[Column] = [
        *_NAMES,
        *map(engine, COLUMNS),
        *(quotient(over, under) for over, under in RATIOS),
        ("CR", lambda case: ratio(case["rows"], "dense", "DMS", "live")),
    ]
    return table(columns, cases, names=None)


def by_case(rows: Iterable[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Group rows by shape, context and sequences, in the order of the tables."""
    cases: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["shape"], row["context"], row["sequences"]), []).append(row)
    return dict(sorted(cases.items()))


def best(rows: list[Row], column: str, value: str) -> Row:
    """Return the row of a column among the rows of one case; empty if there is none.

    vLLM has several modes and may have several runs, and the best one is taken. Ours is the
    newest run.
    """
    if column in OURS:
        mine = [row for row in rows if row["engine"] == OURS[column]]
        return max(mine, key=lambda row: row.get("date", ""), default={})
    mine = [
        row
        for row in rows
        if row["engine"].startswith("vLLM") and PEERS.get(column) in (None, row["cache_dtype"])
    ]
    measured = [row for row in mine if value in row]
    if not measured:
        return mine[0] if mine else {}
    return (min if value == "step_ms" else max)(measured, key=lambda row: row[value])


def ratio(rows: list[Row], over: str, under: str, value: str) -> str:
    """Return the ratio of two columns among the rows of one case; empty if one is not measured."""
    first, second = best(rows, over, value), best(rows, under, value)
    return f"{first[value] / second[value]:.2f}" if value in first and value in second else ""


def _shown(row: Row, value: str) -> str:
    if value in row:
        return f"{row[value]:.2f}" if value == "step_ms" else f"{row[value]:,}"
    return "not measured" if not row else "failed" if "failed" in row else "does not fit"


def name_of(row: Row) -> str:
    """Return engine, mode and cache of a row."""
    if "mode" not in row:
        return str(row["engine"])
    cache = "FP8" if row.get("cache_dtype") == "fp8" else "bf16"
    return f"{row['engine']}, {row['mode']}, {cache} cache"


def _step(row: Row) -> str:
    if reason := row.get("skipped") or row.get("failed"):
        return str(reason)
    return "{:.2f} ({:.2f} to {:.2f})".format(row["step_ms"], *row["step_ms_spread"])


_NAMES: tuple[Column, ...] = (
    ("shape", field("shape")),
    ("sequences x context", lambda row: f"{row['sequences']} x {row['context']}"),
)
ROWS: tuple[Column, ...] = (
    *_NAMES,
    ("engine", name_of),
    ("ms a step (20 % to 80 %)", _step),
    ("prefill tokens/s", field("prefill_tok_s", ",")),
    ("live", field("live")),
    ("measured at", measured_at),
)


def every_row(rows: list[Row]) -> str:
    """Return a table of all rows, with spreads, live tokens, commits and dates."""
    return table(ROWS, [row for mine in by_case(rows).values() for row in mine], names=None)
