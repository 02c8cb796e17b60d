"""The engine on random weights in one configuration: one JSON line for each case.

    python -m benchmarks.serve.ours WAY SHAPE SEQUENCESxCONTEXT ...

The benchmark `serve` starts this module. Every engine has its own process, so that each has the
whole GPU and a failure loses the cases of only one engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.benchmark import skip_reason
from benchmarks.serve.case import Case, measure
from benchmarks.serve.models import KEPT, LONGEST, MEMORY, random_model
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions

WAYS: dict[str, dict[str, Any]] = {
    "DMS": {"policy": "dms"},
    "DMS, FP8 pages": {"policy": "dms", "cache_dtype": "fp8"},
    "dense": {"policy": "keep_all"},
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("shape")
    parser.add_argument("cases", nargs="+", type=Case.parse)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    for row in rows(args):
        print(json.dumps({"engine": args.way, "shape": args.shape, **row}), flush=True)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the cases; those that do not fit have the reason in `skipped`."""
    try:
        engine = start(args.way, args.shape, args.cases, torch.device(args.device))
    except (InferenceError, torch.cuda.OutOfMemoryError) as error:
        yield from skipped(args.cases, error)
        return
    for number, case in enumerate(args.cases):
        try:
            yield measure(engine, case, args.new_tokens)
        except torch.cuda.OutOfMemoryError as error:
            yield from skipped(args.cases[number:], error)
            return


def skipped(cases: list[Case], error: Exception) -> Iterator[dict[str, Any]]:
    """Yield the rows of cases that an error prevents."""
    for case in cases:
        yield {**case._asdict(), "skipped": skip_reason(error)}


def start(way: str, shape: str, cases: list[Case], device: torch.device) -> InferenceEngine:
    """Build an engine for the cases.

    Raises:
        InferenceError: The GPU has no memory for a cache.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = EngineOptions(
        device=str(device),
        max_num_seqs=max(case.sequences for case in cases),
        max_model_len=LONGEST,
        prefill_chunk=8192,
        gpu_memory_utilization=MEMORY,
        decode_steps=1,  # as for requests that are streamed
        **WAYS[way],
    )
    return InferenceEngine(random_model(shape, KEPT, device, dtype), options)


if __name__ == "__main__":
    main()
