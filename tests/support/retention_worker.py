"""One evaluation with hard decisions, in several parallel layouts.

torchrun ... -m tests.support.retention_worker OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny

PROCESSES = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def evaluated(layout: dict[str, Any]) -> StepResult:
    """The result of one evaluation, as every rank sees it."""
    parallel = ParallelOptions(**layout)
    view = groups.start(parallel, seed=1)
    architecture = tiny.architecture("llama")
    spec = PRESETS["dms"].override(window=4, alpha_offset=0.5)
    options = TrainEngineOptions(
        parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7, trains=False
    )
    student = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.01)
    engine = McoreEngine(architecture, spec, view, options, student)
    plan = StepPlan(eviction="hard", channel_scale=0.0, loss="lm")
    result = engine.evaluate(plan, tiny.microbatches(view.dp_rank, view.dp_size))
    groups.stop(keep_process_group=True)
    return result


def main() -> None:
    found = {name: evaluated(layout) for name, layout in LAYOUTS.items()}
    # both ranks must have the result: each writes a file of its own
    rows = {name: {"kept": r.kept, "cr_factor": r.cr_factor} for name, r in found.items()}
    Path(f"{sys.argv[1]}.{groups.dist.get_rank()}").write_text(json.dumps(rows))
    groups.stop()


if __name__ == "__main__":
    main()
