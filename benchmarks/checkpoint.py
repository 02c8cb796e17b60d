"""Time of a checkpoint: seconds that training waits, with and without writing in the background.

    python -m benchmarks checkpoint [--hidden 2048 --layers 8] [--folder DIR]

One process, random weights, AdamW state. The record has medians and extremes. The seconds until a
checkpoint is complete depend on the disk; `blocked` is the time that training waits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark, add_fields
from benchmarks.tables import field, table
from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.spec import PRESETS


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 512, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=8 if cuda else 4, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the seconds of saving and of comparing checksums."""
    view = groups.start(ParallelOptions(), seed=1)
    engine = _engine(args, view)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "step_00000001"
        engine.save(path, {})  # the first save creates the optimizer's state
        rows = {
            "blocked, in the background": _background(engine, path, args.repeats),
            "blocked, waiting": _seconds(lambda: engine.save(path, {}), args.repeats),
            "checksums compared": _seconds(lambda: checkpoint.verify(path, view), args.repeats),
        }
        size = sum(file.stat().st_size for file in path.iterdir())
    groups.stop()
    yield {"hidden": args.hidden, "layers": args.layers, "bytes": size, "seconds": rows}


COLUMNS = (
    ("", field("name")),
    ("median s", field("median", ".3f")),
    ("least", field("least", ".3f")),
    ("most", field("most", ".3f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return the seconds of each operation."""
    rows = [{"name": name, **times} for name, times in record["seconds"].items()]
    head = f"{record['device']}, {record['versions']}, {record['bytes'] / 1e9:.2f} GB"
    return f"{head}\n{table(COLUMNS, rows)}"


def _engine(args: Args, view: groups.ParallelView) -> McoreEngine:
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
    """Time the start and the end of a background save, without the writing in between."""
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


BENCHMARK = Benchmark(
    record="checkpoint",
    options=options,
    repeats=3,
    device=False,
    measure=measure,
    store=add_fields,
    tables=tables,
)
