"""Time of a checkpoint: seconds that training waits, with and without writing in the background.

    python -m benchmarks.checkpoint [--hidden 2048 --layers 8] [--folder DIR] [--output DIR]

One process, random weights, AdamW state. Prints a table and writes `checkpoint.json` into the
folder of the device, with medians and extremes. The seconds until a checkpoint is complete depend
on the disk; `blocked` is the time that training waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import device_name, versions
from dms_train.cli.errors import run_main
from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.spec import PRESETS


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 512)
    parser.add_argument("--layers", type=int, default=8 if cuda else 4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args(arguments)
    return run_main(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    view = groups.start(ParallelOptions(), seed=1)
    engine = _engine(args, view)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "step_00000001"
        engine.save(path, {})  # the first one creates the optimizer's state
        rows = {
            "blocked, in the background": _background(engine, path, args.repeats),
            "blocked, waiting": _seconds(lambda: engine.save(path, {}), args.repeats),
            "checksums compared": _seconds(lambda: checkpoint.verify(path, view), args.repeats),
        }
        size = sum(file.stat().st_size for file in path.iterdir())
    groups.stop()
    record = {
        "device": device_name(view.device),
        "versions": versions(view.device),
        "hidden": args.hidden,
        "layers": args.layers,
        "bytes": size,
        "seconds": rows,
    }
    print(f"{record['device']}, {record['versions']}, {size / 1e9:.2f} GB")
    print("| | median s | least | most |\n|---|---|---|---|")
    for name, times in rows.items():
        print(f"| {name} | {times['median']:.3f} | {times['least']:.3f} | {times['most']:.3f} |")
    target = args.output / str(record["device"]).replace(" ", "_") / "checkpoint.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _engine(args: argparse.Namespace, view: groups.ParallelView) -> McoreEngine:
    architecture = Architecture(
        family="llama",
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=4 * args.hidden,
        num_attention_heads=args.hidden // 64,
        num_query_groups=max(1, args.hidden // 256),
        kv_channels=64,
        vocab_size=32000,
        max_position_embeddings=4096,
        rotary_base=10000.0,
        layernorm_epsilon=1e-5,
        tie_word_embeddings=False,
    )
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype="bf16"), optim=OptimOptions(lr=1e-4), seed=1
    )
    return McoreEngine(
        architecture, PRESETS["dms"], view, options, RandomWeights(architecture, 1, 0.02)
    )


def _background(engine: McoreEngine, path: Path, repeats: int) -> dict[str, float]:
    """Seconds of beginning and of finishing, with the writing in between left out."""
    times = []
    for _ in range(repeats):
        since = time.perf_counter()
        engine.save(path, {}, wait=False)
        spent = time.perf_counter() - since
        while True:
            since = time.perf_counter()
            if engine.finish_save(wait=False) is not None:
                break
            time.sleep(0.05)
        times.append(spent + time.perf_counter() - since)
    return _summary(times)


def _seconds(action: Callable[[], Any], repeats: int) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        since = time.perf_counter()
        action()
        times.append(time.perf_counter() - since)
    return _summary(times)


def _summary(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


if __name__ == "__main__":
    sys.exit(main())
