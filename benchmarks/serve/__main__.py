"""Decode steps and prefill of the engine on random weights, beside vLLM where it is installed.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.serve [SHAPE ...]

Every shape runs with DMS, without eviction, and with DMS and FP8 pages. vLLM runs in processes of
its own, in the same call, with the command of `--peer`; that is `benchmarks.serve.peer` with this
Python if it has vllm. Writes `serve.json` into the folder of the device and prints a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import show
from benchmarks.serve.case import Case, measure
from benchmarks.serve.latency import known_gpu, latency_table
from benchmarks.serve.models import LONGEST, SHAPES, WINDOW, random_model
from benchmarks.timing import device_name, versions
from dms_train.cli.errors import run_main
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions

CASES = (Case(1, 8192), Case(8, 8192), Case(32, 8192), Case(1, 32768))
SMALL = (Case(1, 600), Case(3, 600))
PEER = f"{sys.executable} -m benchmarks.serve.peer"
_FEWEST = 8  # steps of which a median and a spread are meaningful
KEPT = 0.125  # of the tokens behind the window
WAYS: dict[str, dict[str, Any]] = {
    "DMS": {"policy": "dms"},
    "dense": {"policy": "keep_all"},
    "DMS, FP8 pages": {"policy": "dms", "cache_dtype": "fp8"},
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--peer", default=PEER, help="command (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print a stored record and end")
    parser.add_argument(
        "--predicted", type=Path, metavar="JSON", help="print it beside the latency model and end"
    )
    args = parser.parse_args(arguments)
    if args.table:
        return run_main(lambda: show(args.table, lambda record: table(record["cases"])))
    if args.predicted:
        return run_main(lambda: show(args.predicted, _predicted))
    if unknown := set(args.shapes) - set(SHAPES):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(SHAPES)}")
    if args.new_tokens < _FEWEST:
        parser.error(f"--new-tokens {args.new_tokens}: at least {_FEWEST}")
    return run_main(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    record: dict[str, Any] = {
        "device": device_name(device),
        "versions": versions(device),
        "command": "VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.serve",
        "window": WINDOW,
        "kept": KEPT,
        "cases": [],
    }
    folder = args.output / re.sub(r"\W+", "_", record["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes or (list(SHAPES)[:2] if on_gpu else ["small"]):
        record["cases"] += _ours(shape, device, args.new_tokens)
        if on_gpu:
            torch.cuda.empty_cache()
            record["cases"] += _peers(shape, args.peer, args.new_tokens)
        (folder / "serve.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n" + table(record["cases"]))
    print(f"\nwritten: {folder / 'serve.json'}")
    return 0


def _predicted(record: dict[str, Any]) -> str:
    """The steps of a record beside those of the latency model."""
    return latency_table(record["cases"], known_gpu(record["device"]))


def _ours(shape: str, device: torch.device, new_tokens: int) -> list[dict[str, Any]]:
    """Our engine, in every way that the device offers."""
    on_gpu = device.type == "cuda"
    model = random_model(shape, KEPT, device, torch.bfloat16 if on_gpu else torch.float32)
    found = []
    for name, how in WAYS.items():
        if "cache_dtype" in how and not on_gpu:
            continue
        cases: tuple[Case, ...] = CASES if on_gpu else SMALL
        options = EngineOptions(
            device=str(device),
            max_num_seqs=max(case.sequences for case in cases),
            max_model_len=LONGEST,
            prefill_chunk=8192,
            gpu_memory_utilization=0.6,
            decode_steps=1,  # as for requests that are streamed
            **how,
        )
        engine = InferenceEngine(model, options)
        for case in cases:
            entry = {"engine": name, "shape": shape, **measure(engine, case, new_tokens)}
            print(json.dumps(entry), flush=True)
            found.append(entry)
        del engine
    return found


def _peers(shape: str, command: str, new_tokens: int) -> list[dict[str, Any]]:
    """vLLM in its default mode and with graphs for decoding only; nothing where it is missing."""
    if command == PEER and importlib.util.find_spec("vllm") is None:
        print("vllm is not installed: no peer; `--peer` names another Python")
        return []
    found = []
    words = [*command.split(), shape, *(f"{case.sequences}x{case.context}" for case in CASES)]
    words += ["--new-tokens", str(new_tokens)]
    for mode in ([], ["--eager-prefill"]):
        done = subprocess.run([*words, *mode], stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
        found += [json.loads(line) for line in lines]
        print("\n".join(lines), flush=True)
        if done.returncode:
            print(f"the peer ended with {done.returncode}; its cases are incomplete", flush=True)
    return found


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown: a row for each shape, case and engine."""
    rows = [
        "| shape | sequences x context | engine | ms a step (20 % to 80 %) "
        "| prefill tokens/s | live |",
        "|---|---|---|---|---|---|",
    ]
    runs = {case.get("run", 1) for case in cases}
    for case in sorted(cases, key=lambda c: (c["shape"], c["context"], c["sequences"])):
        low, high = case["step_ms_spread"]
        name = case["engine"] + (f", {case['mode']}" if "mode" in case else "")
        if case.get("cache_dtype") == "fp8" and "mode" in case:
            name += ", FP8 cache"
        if len(runs) > 1:
            name += f" (run {case['run']})"
        rows.append(
            f"| {case['shape']} | {case['sequences']} x {case['context']} | {name} "
            f"| {case['step_ms']:.2f} ({low:.2f} to {high:.2f}) | {case['prefill_tok_s']:,} "
            f"| {case.get('live', '')} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
