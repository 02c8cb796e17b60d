"""Sharded checkpoint of several ranks: seconds that training waits, seconds to write, host memory.

    python -m benchmarks sharded_save [--shape qwen2.5-7b] [--layout tp2_sp] [--folder DIR]

Every rank is a process with random weights and AdamW state, and saves its part in the background.
`waits` is the time until the call returns: on a GPU the rank's part is copied to host memory
meanwhile. `writes` is the time from then until the checkpoint has its name: all files are written
and their checksums are computed. `host` is the anonymous memory of a rank and the processes that
write for it, above that before the save. All values are those of the largest rank; the bytes per
second are of one rank. The folder must have room for one checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.benchmark import Args, Benchmark
from benchmarks.conversion import anonymous_bytes
from benchmarks.records import ROOT, Table
from benchmarks.tables import field, table
from benchmarks.train_step.case import DeviceWeights, parallel_options
from benchmarks.train_step.shapes import SHAPES, Case, parse_layout
from dms_train.app import launcher
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import OptimOptions
from dms_train.method.spec import PRESETS

_POLL_SECONDS = 0.05
_MEMORY_SECONDS = 0.5  # the kernel walks all pages of a process for each value
_PATIENCE_SECONDS = 1500


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    shape, layout = ("qwen2.5-7b", "tp2_sp") if cuda else ("smollm2-135m", "dp2")
    add("--shape", choices=SHAPES, default=shape, help="(%(default)s)")
    add("--layout", default=layout, help="(%(default)s)")
    add("--folder", type=Path, help="where to write; default: a temporary folder")


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield one row for each save except the first, which creates the optimizer's state."""
    world = parse_layout(args.layout).world
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = Path(folder) / "result.json"
        spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        words = [args.shape, args.layout, folder, str(args.repeats)]
        command = [sys.executable, *spread, "-m", "benchmarks.sharded_save", *words]
        subprocess.run(command, cwd=ROOT, check=True, timeout=_PATIENCE_SECONDS)
        for row in json.loads(result.read_text()):
            yield {"shape": args.shape, "layout": args.layout, **row}


def _engine(case: Case, view: ParallelView) -> McoreEngine:
    architecture, parallel = SHAPES[case.shape][0], parallel_options(case, view.device)
    settings = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-5), seed=1)
    source = DeviceWeights(architecture, 1, view.device)
    return McoreEngine(architecture, PRESETS["dms"], view, settings, source)


class _HostMemory:
    """Peak of the anonymous memory of this process and its children, above that at the start."""

    def __init__(self) -> None:
        self._before = self.peak = anonymous_bytes(os.getpid())
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(_MEMORY_SECONDS):
            self.peak = max(self.peak, anonymous_bytes(os.getpid()))

    def added(self) -> int:
        """Stop, and return the bytes."""
        self._ends.set()
        self._thread.join()
        return self.peak - self._before


def _save(engine: McoreEngine, path: Path, view: ParallelView) -> dict[str, float]:
    """Save once in the background; return what this rank measured."""
    memory = _HostMemory()
    groups.any_rank(False, view)  # begin together
    since = time.perf_counter()
    engine.save(path, {}, wait=False)
    waited = time.perf_counter() - since
    while engine.finish_save(wait=False) is None:
        time.sleep(_POLL_SECONDS)
    written = time.perf_counter() - since - waited
    size = sum(file.stat().st_size for file in path.glob(f"__{view.rank}_*"))
    return {"bytes": size, "waits": waited, "writes": written, "host": memory.added()}


def _rank(case: Case, folder: Path, repeats: int) -> None:
    """Measure in this rank; rank 0 writes the largest value of all ranks for each save."""
    view = groups.start(parallel_options(case, _device()), seed=1)
    engine, path, rows = _engine(case, view), folder / "step_00000001", []
    for number in range(1 + repeats):
        each = groups.values(_save(engine, path, view))
        rows.append({name: max(rank[name] for rank in each) for name in each[0]})
        if view.rank == 0:
            print(f"save {number} of {repeats}: {json.dumps(rows[-1])}", flush=True)
            shutil.rmtree(path)
    if view.rank == 0:
        (folder / "result.json").write_text(json.dumps(rows[1:]))
    groups.stop()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Run one rank: SHAPE LAYOUT FOLDER REPEATS."""
    shape, layout, folder, repeats = sys.argv[1:]
    case = Case(shape=shape, subject="ours", kind="lm", layout=parse_layout(layout))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // launcher.world_size()))
    _rank(case, Path(folder), int(repeats))


COLUMNS = (
    ("shape", field("shape")),
    ("layout", field("layout")),
    ("GB of a rank", field("bytes", ".2f", 1e-9)),
    ("waits s", field("waits", ".2f")),
    ("writes s", field("writes", ".1f")),
    ("host GB", field("host", ".2f", 1e-9)),
    ("copied GB/s", lambda row: f"{row['bytes'] / row['waits'] / 1e9:.2f}"),
    ("written GB/s", lambda row: f"{row['bytes'] / row['writes'] / 1e9:.2f}"),
)


def tables(record: dict[str, Any]) -> str:
    """Return one row for each save."""
    return f"{record['device']}, {record['versions']}\n{table(COLUMNS, record['cases'])}"


BENCHMARK = Benchmark(
    record="sharded_save",
    options=options,
    repeats=3,
    device=False,
    measure=measure,
    tables=tables,
    stored=(Table("*/sharded_save*.json", "docs/scale.md", ("dms_train/mcore/checkpoints",)),),
)


if __name__ == "__main__":
    main()
