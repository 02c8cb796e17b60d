"""DMS inside vLLM beside plain vLLM: decode steps, prefill, capacity and a storm of requests.

    python -m benchmarks serve vllm_plugin [SHAPE ...] [--ways dms,dense,dense-fp8]

All engines run vLLM, on one directory of random weights for each shape: with the plugin of this
project (`dms`), and without it on the same weights with a bf16 (`dense`) or an FP8 KV cache. Each
runs in the default mode, and without compilation but with graphs for decoding; the tables show the
faster mode. `graphs` is what vLLM made of the mode: the plugin may not support it. Every engine has
its own process. `--engine` is its command, for a Python that has vllm.

- steps: decode steps and prefill, as in the benchmark `serve`. `live` counts the cache slots of the
  blocks that a sequence holds.
- capacity: sequences of 32,768 tokens that decode at once, in the memory of 4.5 bf16 ones.
- storm: 200 requests of a small model in float32, with a pool for all, then with a quarter of the
  blocks that they used. Their tokens are compared, and all blocks and pages must come back.

A result is written at once. The same command at the same commit measures only what is missing;
give another version of vLLM another `--output`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.benchmark import Args, Benchmark, comma_separated, one_of, replace
from benchmarks.records import ROOT, Table, measured_at
from benchmarks.serve.case import FEWEST, Case
from benchmarks.serve.models import ENGINE, KEPT, SERVING_PAGE, SHAPES, WINDOW, architecture
from benchmarks.serve.processes import printed_rows
from benchmarks.serve.random_export import random_folders, refuse_other_models
from benchmarks.serve.tables import by_case
from benchmarks.tables import Column, field, table

ENGINE_COMMAND = f"{sys.executable} -m benchmarks.serve.vllm_engine"
PARTS = ("steps", "capacity", "storm")
# Title, model directory and dtype of the KV cache.
WAYS = {
    "dms": ("DMS", "dms", "auto"),
    "dms-fp8": ("DMS, FP8 cache", "dms", "fp8"),
    "dense": ("vLLM, bf16", "dense", "auto"),
    "dense-fp8": ("vLLM, FP8 cache", "dense", "fp8"),
}
MODES: dict[str, list[str]] = {"default": [], "decode-graphs": ["--eager-prefill"]}
CACHE_SEQUENCES = 4.5  # of the capacity; 18 GiB for Llama-3.1-8B
_KEY = ("part", "way", "mode", "shape", "sequences", "context", "new_tokens")
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Models, engines and cases for a device.

    Attributes:
        shapes: Models.
        ways: Names in `WAYS`.
        steps: Cases of the decode steps.
        capacity: Sequences that wait, and their tokens.
        growth: Tokens that each of them generates: some for each step in which others' prompts are
            computed, and some to measure.
        storm: Requests, and the most tokens of a prompt.
        storm_tokens: Most tokens that a request of the storm generates.
    """

    shapes: tuple[str, ...]
    ways: tuple[str, ...]
    steps: tuple[Case, ...]
    capacity: Case
    growth: int
    storm: Case
    storm_tokens: int


ON_GPU = Sizes(
    shapes=tuple(SHAPES)[:2],
    ways=tuple(WAYS),
    steps=(Case(32, 8192), Case(8, 8192), Case(1, 8192), Case(1, 32768)),
    capacity=Case(64, 32768),
    growth=512,
    storm=Case(200, 1024),
    storm_tokens=256,
)
ON_CPU = Sizes(
    shapes=("small",),
    ways=("dms",),
    steps=(Case(2, 300), Case(1, 300)),
    capacity=Case(3, 300),
    growth=24,
    storm=Case(16, 40),
    storm_tokens=12,
)


class Run(NamedTuple):
    """An engine in a separate process.

    Attributes:
        names: Fields of its rows that distinguish it from other engines.
        cases: Cases that it measures.
        options: Further options of the process.
    """

    names: Row
    cases: list[Case]
    options: list[str]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    names = ", ".join(SHAPES)
    add("shapes", nargs="*", type=one_of(SHAPES), metavar="SHAPE", help=f"of {names}")
    for name, known in (("ways", WAYS), ("modes", MODES), ("parts", PARTS)):
        text = f"of {', '.join(known)} (default: all)"
        add(f"--{name}", type=comma_separated(one_of(known)), metavar="A,B", help=text)
    models = ROOT / "outputs" / "random_models"
    add("--models", type=Path, default=models, help="folder of the weights (%(default)s)")
    add("--engine", default=ENGINE_COMMAND, help="command (%(default)s)")
    add("--new-tokens", type=int, default=64, help="decode steps (%(default)s)")


def check(args: Args) -> None:
    """Refuse too few steps, models of the user in `--models`, and a Python without vLLM."""
    for shape in SHAPES:
        refuse_other_models(args.models, shape)
    if args.new_tokens < 2 * FEWEST:  # the first and the last tokens are not measured
        raise ValueError(f"--new-tokens {args.new_tokens}: at least {2 * FEWEST}")
    if args.engine == ENGINE_COMMAND and importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm is not installed; --engine names a Python that has it")


def settings(args: Args) -> Row:
    """Return the fields of the record that all rows share."""
    return {
        "versions": args.versions,
        "command": "python -m benchmarks serve vllm_plugin",
        "window": WINDOW,
        "kept": KEPT,
        "cache_sequences": CACHE_SEQUENCES,
    }


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEY)


def runs(args: Args) -> Iterator[Run]:
    """Yield the engines that have a result to measure: those of a shape, then the next shape."""
    sizes, finished = _sizes(args), _finished(args)
    ways, parts = args.ways or sizes.ways, args.parts or PARTS
    shapes, modes = args.shapes or sizes.shapes, args.modes or MODES
    engines = [
        {"part": part, "way": way, "mode": mode, "shape": shape}
        for shape, part, way, mode in itertools.product(shapes, PARTS[:2], ways, modes)
    ]
    if "dms" in ways:
        engines.append({"part": "storm", "way": "dms", "mode": "decode-graphs", "shape": "small"})
    for names in engines:
        if names["part"] in parts and (run := _missing(names, args, finished)):
            yield run


def _sizes(args: Args) -> Sizes:
    return ON_GPU if args.device.type == "cuda" else ON_CPU


def _finished(args: Args) -> set[tuple[Any, ...]]:
    """Return the keys of rows that the record has from the commit that is measured now."""
    if not args.file.exists() or not args.origin["commit"] or args.origin.get("changed"):
        return set()
    rows = json.loads(args.file.read_text())["cases"]
    same = [row for row in rows if row.get("commit") == args.origin["commit"]]
    return {_key(row) for row in same if "failed" not in row and not row.get("changed")}


def _missing(names: Row, args: Args, finished: set[tuple[Any, ...]]) -> Run | None:
    """Return an engine with the cases that are not finished; None if all are."""
    sizes = _sizes(args)
    by_part: dict[str, tuple[tuple[Case, ...], int]] = {
        "steps": (sizes.steps, args.new_tokens),
        "capacity": ((sizes.capacity,), sizes.growth),
        "storm": ((sizes.storm,), sizes.storm_tokens),
    }
    cases, new_tokens = by_part[names["part"]]
    names = {**names, "new_tokens": new_tokens}
    missing = [case for case in cases if _key({**names, **case._asdict()}) not in finished]
    _, _, dtype = WAYS[names["way"]]
    words = ["--new-tokens", str(new_tokens), "--kv-cache-dtype", dtype, *MODES[names["mode"]]]
    if names["part"] == "capacity":
        words += ["--cache-bytes", str(_cache_bytes(names["shape"], sizes.capacity.context))]
    return Run(names, missing, words) if missing else None


def _cache_bytes(shape: str, context: int) -> int:
    """Return the bytes of `CACHE_SEQUENCES` sequences in bf16 without eviction."""
    a = architecture(shape)
    token = 2 * 2 * a.num_layers * a.num_query_groups * a.kv_channels
    return int(CACHE_SEQUENCES * context * token)


def measure(run: Run, args: Args) -> Iterator[Row]:
    """Yield the rows of an engine as it prints them.

    Cases without a row, because the process ended before, have `failed`.
    """
    words, rows = _command(run, args), _storm if run.names["part"] == "storm" else printed_rows
    missing, reason = list(run.cases), "the process printed no row"
    try:
        for row in rows(words):
            missing.remove(Case(row["sequences"], row["context"]))
            yield {**row, **run.names, **args.origin}
    except subprocess.CalledProcessError as ended:
        reason = f"the process ended with exit code {ended.returncode} before this case"
    for case in missing:
        yield {**run.names, **case._asdict(), "failed": reason, **args.origin}


def _command(run: Run, args: Args) -> list[str]:
    """Return the words of the process; write the model directory if it is missing."""
    folders = random_folders(run.names["shape"], args.models, args.device)
    gc.collect()
    if args.device.type == "cuda":
        torch.cuda.empty_cache()  # the process needs the memory in which weights were drawn
    _, folder, _ = WAYS[run.names["way"]]
    cases = [case.word for case in run.cases]
    directory = str(getattr(folders, folder))
    return [*args.engine.split(), run.names["part"], directory, *cases, *run.options]


def _storm(words: list[str]) -> Iterator[Row]:
    """Run the storm with a pool for all requests and with a quarter of what they used of it."""
    (large,) = printed_rows([*words, "--blocks", "0"])
    if "skipped" in large:
        yield large
        return
    (small,) = printed_rows([*words, "--blocks", str(large["most_blocks"] // 4)])
    if "skipped" in small:
        yield small
        return
    answers = list(zip(large.pop("tokens"), small.pop("tokens"), strict=True))
    yield {
        **small,
        "equal": sum(before == after for before, after in answers),
        "tokens": sum(len(after) for _, after in answers),
        "preemptions_unlimited": large["preemptions"],
        "blocks_unlimited": large["most_blocks"],
    }


def tables(record: Row) -> str:
    """Return decode steps, prefill, capacity and storm, and every row with its spread."""
    rows = record["cases"]
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    parts = [
        "Milliseconds of a decode step; ratios above 1 mean that DMS is faster:",
        _side_by_side(of["steps"], "step_ms", ".2f", inverse=True),
        "Prefill, tokens/s:",
        _side_by_side(of["steps"], "prefill_tok_s", ","),
        f"Sequences that decode at once in the memory of {record['cache_sequences']:g} bf16 ones:",
        _side_by_side(of["capacity"], "together", ""),
        "Output tokens/s of these:",
        _side_by_side(of["capacity"], "tokens_s", ","),
        "Storm:",
        table(STORM, of["storm"]),
        "All rows:",
        table(ROWS, [row for part in PARTS[:2] for row in _sorted(of[part])], names=None),
    ]
    return "\n\n".join(parts)


def _side_by_side(rows: list[Row], value: str, form: str, inverse: bool = False) -> str:
    """Return a row for each case, a column for each way, and DMS over both plain engines."""

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


def _step(row: Row) -> str:
    if reason := row.get("skipped") or row.get("failed"):
        return str(reason)
    if spread := row.get("step_ms_spread"):
        return "{:.2f} ({:.2f} to {:.2f})".format(row["step_ms"], *spread)
    return f"{row['step_ms']:.2f}"


_NAMES: tuple[Column, ...] = (
    ("shape", field("shape")),
    ("sequences x context", lambda row: f"{row['sequences']} x {row['context']}"),
)
ROWS: tuple[Column, ...] = (
    ("part", field("part")),
    *_NAMES,
    ("engine", lambda row: f"{WAYS[row['way']][0]}, {row['mode']}"),
    ("version", field("engine")),
    ("graphs", field("graphs")),
    ("ms a step (20 % to 80 %)", _step),
    ("prefill tokens/s", field("prefill_tok_s", ",")),
    ("live", field("live")),
    ("at once", field("together")),
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

BENCHMARK = Benchmark(
    record="vllm_plugin",
    options=options,
    check=check,
    cases=runs,
    measure=measure,
    settings=settings,
    store=replace("cases", _key),
    continues="cases",
    tables=tables,
    stored=(Table("*/vllm_plugin.json", SERVING_PAGE, ("dms_train/vllm_plugin", *ENGINE)),),
)
