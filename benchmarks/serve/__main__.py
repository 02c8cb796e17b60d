"""Decode steps and prefill of the engine on random weights, beside vLLM where it is installed.

    python -m benchmarks.serve [SHAPE ...] [--peer COMMAND]

Every shape runs with DMS, with DMS and FP8 pages, and without eviction, and on vLLM with an FP8 and
a bf16 KV cache, each in its default mode and with graphs for decoding only. Every engine runs in a
process of its own with the same share of the GPU's memory. vLLM runs with the command of `--peer`;
that is `benchmarks.serve.peer` with this Python if it has vllm.

Each row is written to `serve.json` in the folder of the device as soon as it is measured, with its
commit and date. Rows that the file already has and that are not measured again are kept. A case
that does not fit has the reason in its row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.records import RESULTS, origin, show
from benchmarks.serve.case import FEWEST, Case
from benchmarks.serve.latency import known_gpu, latency_table
from benchmarks.serve.models import KEPT, MEMORY, SHAPES, WINDOW
from benchmarks.serve.ours import WAYS
from benchmarks.serve.processes import printed_rows
from benchmarks.serve.tables import tables
from benchmarks.timing import device_name, versions
from dms_train.cli.errors import run_main

CASES = (Case(1, 8192), Case(8, 8192), Case(32, 8192), Case(1, 32768))
SMALL = (Case(1, 600), Case(3, 600))
PEER = f"{sys.executable} -m benchmarks.serve.peer"
_KEY = ("mode", "cache_dtype", "shape", "sequences", "context")
Row = dict[str, Any]


class Run(NamedTuple):
    """An engine in a process of its own.

    Attributes:
        names: Keys of its rows that tell it from other engines.
        words: Command that prints one JSON line for each case.
    """

    names: Row
    words: list[str]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, 1 when an engine failed, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--peer", default=PEER, help="command (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, metavar="JSON", help="print a stored record and end")
    parser.add_argument(
        "--predicted", type=Path, metavar="JSON", help="print it beside the latency model and end"
    )
    args = parser.parse_args(arguments)
    if args.table:
        return run_main(lambda: show(args.table, tables))
    if args.predicted:
        return run_main(lambda: show(args.predicted, predicted))
    if unknown := set(args.shapes) - set(SHAPES):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(SHAPES)}")
    if args.new_tokens < FEWEST:
        parser.error(f"--new-tokens {args.new_tokens}: at least {FEWEST}")
    return run_main(lambda: _run(args))


def predicted(record: Row) -> str:
    """The steps of a record beside those of the latency model."""
    return latency_table(record["cases"], known_gpu(record["device"]))


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    record: Row = {
        "device": device_name(device),
        "versions": versions(device),
        "command": "python -m benchmarks.serve",
        "window": WINDOW,
        "kept": KEPT,
        "gpu_memory_utilization": MEMORY,
    }
    file = args.output / re.sub(r"\W+", "_", record["device"].lower()) / "serve.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(file.read_text())["cases"] if file.exists() else []
    measured, failed = origin(), 0
    for shape in args.shapes or (list(SHAPES)[:2] if on_gpu else ["small"]):
        for run in _runs(shape, device, args):
            for row in _rows(run, shape, CASES if on_gpu else SMALL):
                kept = [other for other in kept if _key(other) != _key(row)]
                kept.append(row | measured)
                failed += "failed" in row
                print(json.dumps(row), flush=True)
                file.write_text(json.dumps(record | {"cases": kept}, indent=1) + "\n")
    print(f"\n{tables(record | {'cases': kept})}\n\nwritten: {file}")
    return 1 if failed else 0


def _key(row: Row) -> tuple[Any, ...]:
    engine = "vLLM" if row["engine"].startswith("vLLM") else row["engine"]  # any version
    return engine, *(row.get(name) for name in _KEY)


def _runs(shape: str, device: torch.device, args: argparse.Namespace) -> Iterator[Run]:
    """Our engine in every way that the device offers, then vLLM in its ways."""
    on_gpu = device.type == "cuda"
    cases = [case.word for case in (CASES if on_gpu else SMALL)]
    tokens = ["--new-tokens", str(args.new_tokens)]
    for way, options in WAYS.items():
        if on_gpu or "cache_dtype" not in options:
            words = [sys.executable, "-m", "benchmarks.serve.ours", way, shape, *cases, *tokens]
            yield Run({"engine": way}, [*words, "--device", str(device)])
    if args.peer == PEER and (not on_gpu or importlib.util.find_spec("vllm") is None):
        print("no peer: vllm is not installed, or this is a CPU; `--peer` names another Python")
        return
    for mode, flags in (("default", []), ("graphs for decoding", ["--eager-prefill"])):
        for dtype in ("fp8", "auto"):
            words = [*args.peer.split(), shape, *cases, *tokens, "--kv-cache-dtype", dtype, *flags]
            yield Run({"engine": "vLLM", "mode": mode, "cache_dtype": dtype}, words)


def _rows(run: Run, shape: str, cases: tuple[Case, ...]) -> Iterator[Row]:
    """Yield the rows of an engine as it prints them.

    Cases without a row, because the process ended before, have `failed`.
    """
    missing, code = list(cases), 0
    try:
        for row in printed_rows(run.words):
            missing.remove(Case(row["sequences"], row["context"]))
            yield row
    except subprocess.CalledProcessError as ended:
        code = ended.returncode
    for case in missing:
        failed = f"the process ended with exit code {code} before this case"
        yield {**run.names, "shape": shape, **case._asdict(), "failed": failed}


if __name__ == "__main__":
    raise SystemExit(main())
