"""Host memory and time of `dms-import` and `dms-export`, from a directory of random weights.

    python -m benchmarks conversion [--layers 4] [--ranks 1 2] [--folder DIR]

The layers have the shape of Llama 2 7B, stored in bf16. `dms-import` runs with each number of
`--ranks`, `dms-export` in one process. `peak` is the anonymous memory of all processes, and `peak
of a rank` that of the largest rank and its children, with shared pages counted once. Mapped files
are left out, because their pages can be dropped. On a GPU machine, `dms-export` holds the weights
on the GPU. Two runs with different `--layers` show how the peak grows with the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.benchmark import Args, Benchmark
from benchmarks.tables import field, table
from dms_train.hf.architecture import Architecture
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.json_files import write_json
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_writer import WeightWriter

_TOOLS = "dms_train.checkpoints_tools"
_ANONYMOUS = re.compile(r"^Pss_Anon:\s+(\d+) kB", re.MULTILINE)
_POLL_SECONDS = 0.1
_BF16 = 2


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="of dms-import (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield peak memory and seconds of each command."""
    architecture = _architecture(args.layers)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model, checkpoint, export = (str(Path(folder) / name) for name in ("hf", "mcore", "export"))
        size = {"layers": args.layers, "weights": _write_model(Path(model), architecture)}
        for ranks in args.ranks:
            shutil.rmtree(checkpoint, ignore_errors=True)
            measured = _run("hf_to_megatron", model, checkpoint, ranks=ranks)
            yield {"name": "dms-import", "ranks": ranks, **size, **measured}
        measured = _run("megatron_to_hf", checkpoint, export, "--dtype", "bf16")
        yield {"name": "dms-export", "ranks": 1, **size, **measured}


def _architecture(layers: int) -> Architecture:
    return Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=128,
        vocab_size=32000,
        max_position_embeddings=4096,
        rotary_base=10000.0,
        layernorm_epsilon=1e-5,
        tie_word_embeddings=False,
    )


def _write_model(folder: Path, architecture: Architecture) -> int:
    """Write random bf16 weights, one shard at a time, and return their bytes."""
    folder.mkdir()
    write_json(folder / "config.json", {**to_hf_config(architecture), "dtype": "bfloat16"})
    shapes = expected_shapes(architecture)
    generator = torch.Generator().manual_seed(0)
    with WeightWriter(folder, 2**30) as writer:
        for name, shape in shapes.items():
            writer.add(name, torch.randn(shape, generator=generator).mul_(0.02).bfloat16())
    return _BF16 * sum(math.prod(shape) for shape in shapes.values())


def _run(tool: str, *words: str, ranks: int = 1) -> dict[str, float]:
    """Run a command that must succeed; return its peaks of memory in bytes, and seconds."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *launcher * (ranks > 1), f"{_TOOLS}.{tool}", *words]
    since, total, largest = time.perf_counter(), 0, 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            each = _rank_bytes(process.pid, ranks)
            total, largest = max(total, sum(each)), max(largest, *each)
            time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    seconds = time.perf_counter() - since
    return {"peak": total, "peak_of_a_rank": largest, "seconds": seconds}


def _rank_bytes(pid: int, ranks: int) -> list[int]:
    """Return the anonymous memory of each rank and its children; torchrun itself is left out."""
    if ranks == 1:
        return [anonymous_bytes(pid)]
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid).children()
        return [anonymous_bytes(rank.pid) for rank in started] or [0]
    return [0]


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its children, with each page counted once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(OSError):  # it has just ended
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += sum(int(size) for size in _ANONYMOUS.findall(text)) * 1024
    return total


def _gb(name: str) -> Any:
    return lambda row: f"{row[name] / 1e9:.2f}"


COLUMNS = (
    ("", field("name")),
    ("ranks", field("ranks")),
    ("layers", field("layers")),
    ("weights GB", _gb("weights")),
    ("peak GB", _gb("peak")),
    ("peak of a rank GB", _gb("peak_of_a_rank")),
    ("s", field("seconds", ".0f")),
)


def tables(record: dict[str, Any]) -> str:
    """Return the memory and time of each command."""
    return f"{record['versions']}\n{table(COLUMNS, record['cases'])}"


BENCHMARK = Benchmark(
    record="conversion", options=options, measure=measure, device=False, tables=tables
)
