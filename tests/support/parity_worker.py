"""Loss and every gradient of one training step, for many cases in one parallel layout.

torchrun ... -m tests.support.parity_worker CASES.json OUT_FOLDER
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dms_train.data.batches import Batch
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.token_losses import TOKEN_LOSSES, LossOptions, TokenLoss
from tests.support import tiny

TOKEN_LOSSES["mixed"] = TokenLoss(
    needs_teacher=True,
    terms=("kl", "next_token"),
    per_token=lambda losses, o: (
        losses.divergence(o.kl_direction, o.kl_temperature),
        0.25 * losses.cross_entropy(),
    ),
)


def one_step(
    case: dict[str, Any], view: ParallelView
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Totals on every rank and Hugging Face named gradients on rank 0."""
    architecture = tiny.architecture(case["family"], **case.get("architecture", {}))
    # offset near 0, so that about half of the small eviction channels' decisions evict
    base = PRESETS[case["preset"]]
    window = {"window": 4} if base.kind == "dms" else {}
    spec = base.override(**{**window, "alpha_offset": 0.5, **case.get("spec", {})})
    parallel = ParallelOptions(**case["layout"])
    options = TrainEngineOptions(
        parallel=parallel,
        optim=OptimOptions(lr=1e-3),
        seed=7,
        loss=LossOptions(**case.get("loss", {})),
    )
    std = case.get("std", 0.2)
    source = tiny.small_channels(spec.kind)
    student = source(architecture, 1, spec.channel, factor=0.002, std=std)
    engine = McoreEngine(architecture, spec, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, std))
    plan = StepPlan(**{"step": 3, "eviction": "soft", "channel_scale": 0.0, **case["plan"]})
    length = case.get("length", tiny.LENGTH)
    batches = tiny.microbatches(view.dp_rank, view.dp_size, length=length)
    if case.get("packed"):
        batches = [tiny.packed(batch, _lengths(batch)) for batch in batches]
    totals = engine.forward_backward(plan, batches)
    loss = {"token_loss": totals.token_loss, "aux_loss": totals.aux_loss, **totals.terms}
    means = {"alpha": totals.alpha / totals.samples, "live": totals.live}
    return {**loss, **means}, engine.hf_gradients()


def _lengths(batch: Batch) -> list[list[int]]:
    """Documents of each sample; some samples end in padding."""
    length = batch.tokens.shape[1]
    return [[length // 3, 1, length // 3 + int(n) % 5, 3] for n in batch.samples]


def _groups_of(case: dict[str, Any]) -> list[int | None]:
    """What a layout's process groups depend on; making them takes long on GPUs."""
    kinds = ("tensor", "pipeline", "virtual_pipeline")
    return [case["layout"].get(f"{kind}_model_parallel_size") for kind in kinds]


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    for _, alike in itertools.groupby(sorted(cases, key=lambda c: str(_groups_of(c))), _groups_of):
        first, *rest = alike
        view = groups.start(ParallelOptions(**first["layout"]), seed=1)
        for case in (first, *rest):
            totals, gradients = one_step(case, view)
            if gradients:
                metadata = {"totals": json.dumps(totals)}
                save_file(gradients, out / f"{case['name']}.safetensors", metadata=metadata)
        groups.stop(keep_process_group=True)
    groups.stop()


if __name__ == "__main__":
    main()
