"""One case of the benchmark `plan_memory` in this process, or in this rank of torchrun.

    python -m benchmarks.plan_memory.case CASE.json RESULT.json

The steps use the real engine with random weights. Every case has its own process, so that its peak
memory does not include another case.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import timing
from benchmarks.train_step.case import parallel_options, step_of_ours
from benchmarks.train_step.shapes import Case
from dms_train.app import launcher
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView


def measure(case: Case) -> dict[str, Any]:
    """Return the memory of every pipeline stage and the time of a step, the same on every rank."""
    on_gpu = torch.cuda.is_available()
    parallel = parallel_options(case, torch.device("cuda" if on_gpu else "cpu"))
    view = groups.start(parallel, seed=1)
    step = step_of_ours(case, view, parallel)
    times = []
    for _ in range(case.warmup + case.steps):
        since = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(view.device)
        times.append(time.perf_counter() - since)
    row = {
        "step_s": statistics.median(times[case.warmup :]),
        "stages": _stages(view, case.layout.pp),
        "device": timing.device_name(view.device),
        "versions": timing.versions(view.device),
    }
    groups.stop()
    return row


def _stages(view: ParallelView, pp: int) -> list[dict[str, float]]:
    """Return bytes on the fullest process of each pipeline stage; all 0 on a CPU."""
    names = ("allocated", "reserved", "used")
    bytes_of = torch.zeros(pp, len(names), dtype=torch.float64, device=view.device)
    if view.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(view.device)
        own = (
            torch.cuda.max_memory_allocated(view.device),
            torch.cuda.max_memory_reserved(view.device),
            total
            - free
            + torch.cuda.max_memory_reserved(view.device)
            - torch.cuda.memory_reserved(view.device),
        )
        bytes_of[view.pp_rank] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(bytes_of, dist.ReduceOp.MAX)
    return [dict(zip(names, stage, strict=True)) for stage in bytes_of.tolist()]


def main() -> None:
    """Read the case, measure it, and write the result on rank 0."""
    case = Case.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    row = measure(case)
    if launcher.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
