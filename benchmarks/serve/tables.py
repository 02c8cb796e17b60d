"""Tables of decode steps and prefill: vLLM, this engine without eviction, and with DMS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.records import measured_at

Row = dict[str, Any]
PEERS = {"vLLM, FP8 cache": "fp8", "vLLM, bf16": "auto"}
OURS = {"dense": "dense", "DMS": "DMS", "DMS, FP8": "DMS, FP8 pages"}
COLUMNS = (*PEERS, *OURS)
FASTER = "faster vLLM"  # of both caches
# What the engine gives, what DMS gives, and what both give beside the peer that users choose.
RATIOS = (
    ("dense", "vLLM, bf16"),
    ("DMS", "dense"),
    ("DMS", "vLLM, FP8 cache"),
    ("DMS", FASTER),
)


def tables(record: Row) -> str:
    """Markdown: decode steps and prefill side by side, and every row with its spread."""
    rows = record["cases"]
    return "\n".join(
        [
            "Milliseconds of a decode step; ratios below 1 are faster:",
            "",
            *side_by_side(rows, "step_ms"),
            "",
            "Prefill, tokens/s; ratios above 1 are faster:",
            "",
            *side_by_side(rows, "prefill_tok_s"),
            "",
            *every_row(rows),
        ]
    )


def side_by_side(rows: list[Row], value: str) -> Iterator[str]:
    """Lines of a table: a row for each case, a column for each engine, `RATIOS`, and CR."""
    heads = [*COLUMNS, *(f"{over} / {under}" for over, under in RATIOS), "CR"]
    yield f"| shape | sequences x context | {' | '.join(heads)} |"
    yield "|---|---|" + "---|" * len(heads)
    for (shape, context, sequences), mine in by_case(rows).items():
        cells = [_shown(best(mine, name, value), value) for name in COLUMNS]
        cells += [ratio(mine, over, under, value) for over, under in RATIOS]
        cells.append(ratio(mine, "dense", "DMS", "live"))
        yield f"| {shape} | {sequences} x {context} | {' | '.join(cells)} |"


def by_case(rows: Iterable[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Rows by shape, context and sequences, in the order of the tables."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["shape"], row["context"], row["sequences"]), []).append(row)
    return dict(sorted(found.items()))


def best(rows: list[Row], column: str, value: str) -> Row:
    """Return the row of a column among the rows of one case; empty if there is none.

    vLLM has several modes and may have several runs: its best one is taken. Ours is the newest.
    """
    if column in OURS:
        mine = [row for row in rows if row["engine"] == OURS[column]]
        return max(mine, key=lambda row: row.get("date", ""), default={})
    mine = [
        row
        for row in rows
        if row["engine"].startswith("vLLM") and PEERS.get(column) in (None, row["cache_dtype"])
    ]
    done = [row for row in mine if value in row]
    if not done:
        return mine[0] if mine else {}
    return (min if value == "step_ms" else max)(done, key=lambda row: row[value])


def ratio(rows: list[Row], over: str, under: str, value: str) -> str:
    """Ratio of two columns among the rows of one case; empty if one is not measured."""
    first, second = best(rows, over, value), best(rows, under, value)
    return f"{first[value] / second[value]:.2f}" if value in first and value in second else ""


def _shown(row: Row, value: str) -> str:
    if value in row:
        return f"{row[value]:.2f}" if value == "step_ms" else f"{row[value]:,}"
    return "not measured" if not row else "failed" if "failed" in row else "does not fit"


def name_of(row: Row) -> str:
    """Engine, mode and cache of a row."""
    if "mode" not in row:
        return str(row["engine"])
    cache = "FP8" if row.get("cache_dtype") == "fp8" else "bf16"
    return f"{row['engine']}, {row['mode']}, {cache} cache"


def every_row(rows: list[Row]) -> Iterator[str]:
    """Lines of a table of all rows, with spreads, live tokens, commits and dates."""
    yield (
        "| shape | sequences x context | engine | ms a step (20 % to 80 %) "
        "| prefill tokens/s | live | measured at |"
    )
    yield "|---|---|---|---|---|---|---|"
    for (shape, context, sequences), mine in by_case(rows).items():
        for row in mine:
            step = row.get("skipped") or row.get("failed")
            if step is None:
                low, high = row["step_ms_spread"]
                step = f"{row['step_ms']:.2f} ({low:.2f} to {high:.2f})"
            prefill = f"{row['prefill_tok_s']:,}" if "prefill_tok_s" in row else ""
            yield (
                f"| {shape} | {sequences} x {context} | {name_of(row)} | {step} "
                f"| {prefill} | {row.get('live', '')} | {measured_at(row)} |"
            )
