"""Loss and every gradient of one training step, for many cases in one parallel layout.

torchrun ... -m tests.support.parity_worker CASES.json OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dms_train.mcore import groups
from dms_train.mcore.engine import EngineOptions, McoreEngine
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.weights import RandomWeights
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny


def one_step(case: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Totals on every rank and Hugging Face named gradients on rank 0."""
    parallel = ParallelOptions(**case["layout"])
    view = groups.start(parallel, seed=1)
    architecture = tiny.architecture(case["family"])
    # offset near 0, so that about half of the small lanes' decisions evict
    changes = {"window": 4, "alpha_offset": 0.5, **case.get("spec", {})}
    spec = PRESETS[case["preset"]].override(**changes)
    options = EngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7)
    student = tiny.SmallLanes(architecture, 1, spec.channel, factor=0.002)
    engine = McoreEngine(architecture, spec, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, 0.2))
    plan = StepPlan(**{"step": 3, "eviction": "soft", "neuron_scale": 0.0, **case["plan"]})
    totals = engine.forward_backward(plan, tiny.microbatches(view.dp_rank, view.dp_size))
    gradients = engine.hf_gradients()
    groups.stop(keep_process_group=True)
    loss = {"token_loss": totals.token_loss, "aux_loss": totals.aux_loss}
    return {**loss, "alpha": totals.alpha / totals.samples, "live": totals.live}, gradients


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    for case in cases:
        totals, gradients = one_step(case)
        if gradients:
            metadata = {"totals": json.dumps(totals)}
            save_file(gradients, out / f"{case['name']}.safetensors", metadata=metadata)
    groups.stop()


if __name__ == "__main__":
    main()
