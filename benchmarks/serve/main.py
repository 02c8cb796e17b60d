"""Decode steps and prefill of the engine on random weights, and of vLLM if it is installed.

    python -m benchmarks serve [SHAPE ...] [--peer COMMAND]

Every shape runs with DMS, with DMS and FP8 pages, and without eviction. It also runs on vLLM with
an FP8 and a bf16 KV cache, each in the default mode and with graphs for decoding only. Every engine
has its own process and the same share of the GPU's memory. `--peer` is the command of vLLM; the
default is `benchmarks.serve.peer` with this Python if it has vllm.

Each row names its commit and date. Rows that the record already has and that are not measured again
are kept. A case that does not fit has the reason in its row.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.benchmark import Args, Benchmark, Page, one_of, replace
from benchmarks.records import Table
from benchmarks.serve import page
from benchmarks.serve.case import FEWEST, Case
from benchmarks.serve.latency import known_gpu, latency_table
from benchmarks.serve.models import ENGINE, KEPT, MEMORY, SERVING_PAGE, SHAPES, WINDOW
from benchmarks.serve.ours import WAYS
from benchmarks.serve.processes import printed_rows
from benchmarks.serve.tables import tables

CASES = (Case(1, 8192), Case(8, 8192), Case(32, 8192), Case(1, 32768))
SMALL = (Case(1, 600), Case(3, 600))
PEER = f"{sys.executable} -m benchmarks.serve.peer"
_KEY = ("mode", "cache_dtype", "shape", "sequences", "context")
Row = dict[str, Any]


class Run(NamedTuple):
    """An engine in a separate process.

    Attributes:
        shape: Model.
        names: Fields of its rows that distinguish it from other engines.
        words: Command that prints one JSON line for each case.
    """

    shape: str
    names: Row
    words: list[str]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    names = ", ".join(SHAPES)
    add("shapes", nargs="*", type=one_of(SHAPES), metavar="SHAPE", help=f"of {names}")
    add("--peer", default=PEER, help="command (%(default)s)")
    add("--new-tokens", type=int, default=64, help="(%(default)s)")


def check(args: Args) -> None:
    """Refuse too few steps."""
    if args.new_tokens < FEWEST:
        raise ValueError(f"--new-tokens {args.new_tokens}: at least {FEWEST}")


def predicted(record: Row) -> str:
    """Return the steps of a stored record and of the latency model as text."""
    return latency_table(record["cases"], known_gpu(record["device"]))


def settings(args: Args) -> Row:
    """Return the fields of the record that all rows share."""
    return {
        "versions": args.versions,
        "command": "python -m benchmarks serve",
        "window": WINDOW,
        "kept": KEPT,
        "gpu_memory_utilization": MEMORY,
    }


def _key(row: Row) -> tuple[Any, ...]:
    engine = "vLLM" if row["engine"].startswith("vLLM") else row["engine"]  # any version
    return engine, *(row.get(name) for name in _KEY)


def runs(args: Args) -> Iterator[Run]:
    """Yield our engine in every way that the device offers, then vLLM, for each shape."""
    on_gpu = args.device.type == "cuda"
    for shape in args.shapes or (list(SHAPES)[:2] if on_gpu else ["small"]):
        given = [shape, *(case.word for case in _cases(args))]
        given += ["--new-tokens", str(args.new_tokens)]
        for way, kind in WAYS.items():
            if on_gpu or "cache_dtype" not in kind:
                words = [sys.executable, "-m", "benchmarks.serve.ours", way, *given]
                yield Run(shape, {"engine": way}, [*words, "--device", str(args.device)])
        if args.peer == PEER and (not on_gpu or importlib.util.find_spec("vllm") is None):
            print("no peer: vllm is not installed, or this is a CPU; --peer names another Python")
        else:
            yield from _peers(shape, [*args.peer.split(), *given])


def _cases(args: Args) -> tuple[Case, ...]:
    return CASES if args.device.type == "cuda" else SMALL


def _peers(shape: str, words: list[str]) -> Iterator[Run]:
    for mode, flags in (("default", []), ("graphs for decoding", ["--eager-prefill"])):
        for dtype in ("fp8", "auto"):
            names = {"engine": "vLLM", "mode": mode, "cache_dtype": dtype}
            yield Run(shape, names, [*words, "--kv-cache-dtype", dtype, *flags])


def measure(run: Run, args: Args) -> Iterator[Row]:
    """Yield the rows of an engine as it prints them.

    Cases without a row, because the process ended before, have `failed`.
    """
    missing, code = list(_cases(args)), 0
    try:
        for row in printed_rows(run.words):
            missing.remove(Case(row["sequences"], row["context"]))
            yield row | args.origin
    except subprocess.CalledProcessError as ended:
        code = ended.returncode
    for case in missing:
        failed = f"the process ended with exit code {code} before this case"
        row = {**run.names, "shape": run.shape, **case._asdict(), "failed": failed}
        yield row | args.origin


BENCHMARK = Benchmark(
    record="serve",
    options=options,
    check=check,
    cases=runs,
    measure=measure,
    settings=settings,
    store=replace("cases", _key),
    continues="cases",
    tables=tables,
    views={"predicted": predicted},
    stored=(Table("*/serve.json", SERVING_PAGE, ENGINE),),
    page=Page(page.PAGE, page.write),
)
