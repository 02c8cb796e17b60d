"""Tables of DMS inside vLLM beside plain vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.records import measured_at
from benchmarks.serve.tables import by_case
from benchmarks.tables import Column, field, table

Row = dict[str, Any]
PARTS = ("steps", "two_gpus", "capacity", "grown", "trace", "server", "storm")
ONE_GPU = ("steps", "capacity", "grown")
# Title, model directory and dtype of the KV cache.
WAYS = {
    "dms": ("DMS", "dms", "auto"),
    "dms-fp8": ("DMS, FP8 cache", "dms", "fp8"),
    "dense": ("vLLM, bf16", "dense", "auto"),
    "dense-fp8": ("vLLM, FP8 cache", "dense", "fp8"),
}


def tables(record: Row) -> str:
    """Return each part with the ways side by side, and every row with its spread."""
    rows = record["cases"]
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    at_once, speed = "Sequences that decode at once", "Output tokens/s of these:"
    fixed = f"{at_once} in the memory of {record['cache_sequences']:g} bf16 ones:"
    step = "Milliseconds of a decode step"
    parts = [
        ("steps", f"{step}; ratios above 1 mean that DMS is faster:", _gains("step_ms", ".2f")),
        ("steps", "Prefill, tokens/s:", _gains("prefill_tok_s", ",")),
        ("two_gpus", f"{step} on two GPUs:", _gains("step_ms", ".2f")),
        ("two_gpus", "Pages of these:", _rows(RANKS)),
        ("capacity", fixed, _gains("together", "")),
        ("capacity", speed, _gains("tokens_s", ",")),
        ("grown", f"{at_once} in the whole memory:", _gains("together", "")),
        ("grown", speed, _gains("tokens_s", ",")),
        ("trace", "Requests/s that are sustained:", _gains("requests_s", ".2f")),
        ("trace", "Traces:", _rows(TRACES)),
        ("server", "Server, measured by `vllm bench serve`:", _rows(SERVERS)),
        ("storm", "Storm:", _rows(STORM)),
    ]
    shown = [text for part, title, lines in parts if of[part] for text in (title, lines(of[part]))]
    one_gpu = [row for part in ONE_GPU for row in _sorted(of[part])]
    return "\n\n".join([*shown, "All rows:", table(ROWS, one_gpu, names=None)])


def _gains(value: str, form: str) -> Callable[[list[Row]], str]:
    return lambda rows: _side_by_side(rows, value, form)


def _rows(columns: tuple[Column, ...]) -> Callable[[list[Row]], str]:
    return lambda rows: table(columns, _sorted(rows), names=None)


def _side_by_side(rows: list[Row], value: str, form: str) -> str:
    """Return a row for each case, a column for each way, and DMS over both plain engines."""
    inverse = value == "step_ms"

    def of_way(way: str) -> Callable[[Row], str]:
        return lambda case: field(value, form)(_best(case["rows"], way, value))

    def gain(over: str) -> Callable[[Row], str]:
        def content(case: Row) -> str:
            ours, theirs = (_best(case["rows"], way, value) for way in ("dms", over))
            if value not in ours or value not in theirs:
                return ""
            return f"{(ours[value] / theirs[value]) ** (-1 if inverse else 1):.2f}"

        return content

    cases = [
        {"shape": shape, "sequences": sequences, "context": context, "rows": mine}
        for (shape, context, sequences), mine in by_case(rows).items()
    ]
    columns = [*_NAMES, *((title, of_way(way)) for way, (title, _, _) in WAYS.items())]
    columns += [(f"gain over {WAYS[over][0]}", gain(over)) for over in ("dense", "dense-fp8")]
    return table(columns, cases, names=None)


def _best(rows: list[Row], way: str, value: str) -> Row:
    """Return the row of the faster mode among those of one case; empty if there is none."""
    mine = [row for row in rows if row["way"] == way and value in row]
    pick = min if value == "step_ms" else max
    return pick(mine, key=lambda row: row[value], default={})


def _sorted(rows: list[Row]) -> list[Row]:
    return [row for mine in by_case(rows).values() for row in mine]


def _engine(row: Row) -> str:
    return f"{WAYS[row['way']][0]}, {row['mode']}"


def _step(row: Row) -> str:
    if reason := row.get("skipped") or row.get("failed"):
        return str(reason)
    if spread := row.get("step_ms_spread"):
        return "{:.2f} ({:.2f} to {:.2f})".format(row["step_ms"], *spread)
    return f"{row['step_ms']:.2f}"


def _between_tokens(row: Row) -> str:
    if reason := row.get("skipped") or row.get("failed"):
        return str(reason)
    return _percentiles("itl_ms")(row)


def _percentiles(name: str) -> Callable[[Row], str]:
    def content(row: Row) -> str:
        return f"{row[name]['p50']:.1f} / {row[name]['p99']:.1f}" if name in row else ""

    return content


_NAMES: tuple[Column, ...] = (
    ("shape", field("shape")),
    ("sequences x context", lambda row: f"{row['sequences']} x {row['context']}"),
)
ROWS: tuple[Column, ...] = (
    ("part", field("part")),
    *_NAMES,
    ("engine", _engine),
    ("version", field("engine")),
    ("graphs", field("graphs")),
    ("ms a step (20 % to 80 %)", _step),
    ("prefill tokens/s", field("prefill_tok_s", ",")),
    ("live", field("live")),
    ("at once", field("together")),
    ("measured at", measured_at),
)
RANKS: tuple[Column, ...] = (
    *ROWS[1:6],
    ("pages of the ranks", lambda row: ", ".join(map(str, row.get("pages_of_ranks", ())))),
    ROWS[-1],
)
TRACES: tuple[Column, ...] = (
    *_NAMES,
    ("tokens out", field("new_tokens")),
    ("engine", _engine),
    ("version", field("engine")),
    ("graphs", field("graphs")),
    ("requests/s", field("requests_s", ".2f")),
    ("in flight", field("in_flight")),
    ("ms between tokens, p50 / p99", _between_tokens),
    ("s to the first token, mean", field("wait_s", ".2f")),
    ("preemptions of all probes", field("preemptions")),
    ("measured at", measured_at),
)
SERVERS: tuple[Column, ...] = (
    *_NAMES,
    ("tokens out", field("new_tokens")),
    ("engine", _engine),
    ("version", field("engine")),
    ("requests/s sent", field("rate", "g")),
    ("requests/s", field("requests_s", ".2f")),
    ("output tokens/s", field("tokens_s", ",")),
    ("ms between tokens, p50 / p99", _between_tokens),
    ("ms to the first token, p50 / p99", _percentiles("ttft_ms")),
    ("measured at", measured_at),
)
STORM: tuple[Column, ...] = (
    ("requests", field("sequences")),
    ("with equal tokens", field("equal")),
    ("preemptions", field("preemptions")),
    ("pool, blocks", field("blocks")),
    ("blocks used of an unlimited pool", field("blocks_unlimited")),
    ("missing blocks", field("missing_blocks")),
    ("missing pages", field("missing_pages")),
    ("reason", lambda row: str(row.get("skipped") or row.get("failed") or "")),
    ("measured at", measured_at),
)
