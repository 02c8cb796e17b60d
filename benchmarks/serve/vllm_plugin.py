"""DMS inside vLLM beside plain vLLM: decode steps, capacity, sustained rates and a storm.

    python -m benchmarks serve vllm_plugin [SHAPE ...] [--ways dms,dense,dense-fp8]

All engines run vLLM, on one directory of random weights for each shape: with the plugin of this
project (`dms`), and without it on the same weights with a bf16 (`dense`) or an FP8 KV cache. Each
runs in the default mode, and without compilation but with graphs for decoding; the tables show the
faster mode. `graphs` is what vLLM made of the mode: the plugin may not support it. Every engine has
its own process. `--engine` is its command, for a Python that has vllm.

- steps: decode steps and prefill, as in the benchmark `serve`. `live` counts the cache slots of the
  blocks that a sequence holds.
- two_gpus: decode steps of two tensor-parallel ranks, and how many pages each holds.
- capacity: sequences of 32,768 tokens that decode at once, in the memory of 4.5 bf16 ones.
- grown: the same in the whole memory.
- trace: requests per second that an engine sustains, with 1,024 tokens in and 2,048 out, and with
  8,192 in and 1,024 out (`steady.py`). The 99th percentile of the time between tokens is at most
  30 ms, and the mean time to the first token at most 2 s.
- server: `vllm serve`, measured by `vllm bench serve`. Both need vLLM's packages for serving, and
  DMS needs this package installed beside vLLM.
- storm: 200 requests of a small model in float32, with a pool for all and without CUDA graphs, then
  with a quarter of the blocks that they used. Their tokens are compared, and all blocks and pages
  must come back.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.benchmark import Args, Benchmark, comma_separated, one_of, replace
from benchmarks.records import ROOT, Table
from benchmarks.serve.case import FEWEST, Case
from benchmarks.serve.models import ENGINE, KEPT, SERVING_PAGE, SHAPES, WINDOW, architecture
from benchmarks.serve.processes import printed_rows
from benchmarks.serve.random_export import random_folders, refuse_other_models
from benchmarks.serve.vllm_tables import PARTS, WAYS, Row, tables

ENGINE_COMMAND = f"{sys.executable} -m benchmarks.serve.vllm_engine"
MODES: dict[str, list[str]] = {"default": [], "decode-graphs": ["--eager-prefill"]}
CACHE_SEQUENCES = 4.5  # of the capacity; 18 GiB for Llama-3.1-8B
_KEY = ("part", "way", "mode", "shape", "sequences", "context", "new_tokens")


class Work(NamedTuple):
    """Cases that one process measures.

    Attributes:
        cases: Cases.
        new_tokens: Tokens that each sequence generates.
        options: Further options of the process.
    """

    cases: tuple[Case, ...]
    new_tokens: int
    options: tuple[str, ...] = ()


class Sizes(NamedTuple):
    """Models, engines and cases for a device.

    Attributes:
        shapes: Models.
        ways: Names in `WAYS`.
        steps: Cases of the decode steps.
        two_gpus: The case of two ranks.
        capacity: Sequences that wait. Each generates some tokens for each step in which others'
            prompts are computed, and some to measure.
        grown: The same in the whole memory.
        traces: Largest numbers of requests in flight.
        server: Requests that the client sends.
        storm: Requests, with the most tokens of a prompt and of an answer.
    """

    shapes: tuple[str, ...]
    ways: tuple[str, ...]
    steps: tuple[Case, ...]
    two_gpus: tuple[Case, ...]
    capacity: Work
    grown: Work
    traces: tuple[Work, ...]
    server: Work
    storm: Work


_SHORT_PROBES = (
    *("--max-itl-ms", "1e6", "--max-wait-s", "1e6"),
    *("--warm-up-s", "0.1", "--window-s", "1"),
)
ON_GPU = Sizes(
    shapes=tuple(SHAPES)[:2],
    ways=tuple(WAYS),
    steps=(Case(32, 8192), Case(8, 8192), Case(1, 8192), Case(1, 32768)),
    two_gpus=(Case(32, 8192),),
    capacity=Work((Case(64, 32768),), 512),
    grown=Work((Case(128, 32768),), 512),
    traces=(Work((Case(384, 1024),), 2048), Work((Case(256, 8192),), 1024)),
    server=Work((Case(160, 1024),), 1024, ("--request-rate", "4")),
    storm=Work((Case(200, 1024),), 256),
)
ON_CPU = Sizes(
    shapes=("small",),
    ways=("dms",),
    steps=(Case(1, 300), Case(2, 20)),
    two_gpus=(Case(2, 20),),
    capacity=Work((Case(3, 300),), 16),
    grown=Work((Case(2, 20),), 12),
    traces=(Work((Case(3, 20),), 12, _SHORT_PROBES),),
    server=Work((Case(3, 20),), 5, ("--request-rate", "100")),
    storm=Work((Case(8, 40),), 8),
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
        for shape, part, way, mode in itertools.product(shapes, PARTS[:-1], ways, modes)
    ]
    if "dms" in ways:
        engines.append({"part": "storm", "way": "dms", "mode": "decode-graphs", "shape": "small"})
    for names in (names for names in engines if names["part"] in parts):
        for work in _work(names["part"], args):
            if run := _missing(names, work, finished):
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


def _work(part: str, args: Args) -> tuple[Work, ...]:
    """Return what is measured of a part, with an engine for each."""
    sizes = _sizes(args)
    by_part: dict[str, tuple[Work, ...]] = {
        "steps": (Work(sizes.steps, args.new_tokens),),
        "two_gpus": (Work(sizes.two_gpus, args.new_tokens, ("--gpus", "2")),),
        "capacity": (sizes.capacity,),
        "grown": (sizes.grown,),
        "trace": sizes.traces,
        "server": (sizes.server,),
        "storm": (sizes.storm,),
    }
    return by_part[part]


def _missing(names: Row, work: Work, finished: set[tuple[Any, ...]]) -> Run | None:
    """Return an engine with the cases that are not finished; None if all are."""
    names = {**names, "new_tokens": work.new_tokens}
    missing = [case for case in work.cases if _key({**names, **case._asdict()}) not in finished]
    _, _, dtype = WAYS[names["way"]]
    words = ["--new-tokens", str(work.new_tokens), "--kv-cache-dtype", dtype, *work.options]
    words += MODES[names["mode"]]
    if names["part"] == "capacity":
        words += ["--cache-bytes", str(_cache_bytes(names["shape"], work.cases[0].context))]
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
    """Run the storm with a pool for all requests and with a quarter of what they used of it.

    The first has no CUDA graphs, so that equal tokens confirm those of the second.
    """
    (large,) = printed_rows([*words, "--blocks", "0", "--eager"])
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
    stored=(
        Table("*/vllm_plugin.json", SERVING_PAGE, ("dms_train/vllm_plugin", *ENGINE)),
        Table(
            "*/vllm_plugin_busy_host.json",
            "docs/guides/vllm.md",
            ("dms_train/vllm_plugin", *ENGINE),
        ),
    ),
)
