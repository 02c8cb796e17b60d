"""Hugging Face directories through every parallel layout, and checkpoints between layouts.

torchrun ... -m tests.support.convert_worker MODELS_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dms_train.families import FAMILIES
from dms_train.hf.architecture import from_hf_config
from dms_train.hf.directory import WeightReader
from dms_train.hf.json_files import read_config
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

PROCESSES = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1_pp1": {},
    "tp2_pp1": {"tensor_model_parallel_size": 2},
    "tp1_pp2": {"pipeline_model_parallel_size": 2},
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
SAVED_IN = "tp2_pp1"
LOADED_IN = ("tp1_pp2", "tp2_pp2")
LENGTH = 160
VOCAB = 61
SEED, STEP = 7, 3
SPEC = PRESETS["dms"].override(window=4)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(8))


def build(model: Path, layout: str, view: ParallelView, source: Any) -> McoreEngine:
    options = TrainEngineOptions(
        parallel=ParallelOptions(**LAYOUTS[layout]),
        optim=OptimOptions(lr=1e-3),
        seed=SEED,
        trains=False,
    )
    return McoreEngine(from_hf_config(read_config(model)), SPEC, view, options, source)


def weights_of(engine: McoreEngine) -> dict[str, Tensor]:
    return dict(engine.hf_tensors())


def keep_shares(engine: McoreEngine, view: ParallelView) -> dict[str, Tensor]:
    """log(1 - alpha) that this rank's kernels get, by layer, head and sample."""
    seen: dict[int, list[Tensor]] = {}
    for layer in engine._models[0].decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda _, args, number=layer.layer_number: seen.setdefault(number, []).append(args[3])
        )
    engine.reset_eviction_channel()
    batches = tiny.microbatches(view.dp_rank, view.dp_size)
    plan = StepPlan(step=STEP, eviction="soft", channel_scale=0.0, loss="lm")
    engine.evaluate(plan, batches)
    shares = {}
    for number, kept in seen.items():
        for batch, log_keep in zip(batches, kept, strict=True):
            for row, sample in enumerate(batch.samples.tolist()):
                for head in range(log_keep.shape[1]):
                    name = f"{number}.{view.tp_rank * log_keep.shape[1] + head}.{sample}"
                    shares[name] = log_keep[row, head].clone()
    return shares


def run(models: Path, out: Path, layout: str) -> None:
    view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
    for family in FAMILIES:
        engine = build(models / family, layout, view, WeightReader(models / family))
        weights, recording = weights_of(engine), engine.record(StepPlan(), tokens())
        if recording is not None:
            contents = {**weights, "logits": recording.logits}
            save_file(contents, out / f"{family}-{layout}.safetensors")
        if layout == SAVED_IN:
            engine.save_weights(out / f"{family}-checkpoint", {"family": family})
        if layout in LOADED_IN:
            other = RandomWeights(engine.architecture, 99, 0.2)
            engine = build(models / family, layout, view, other)
            engine.load(out / f"{family}-checkpoint", with_optimizer=False)
            loaded = weights_of(engine)
            if view.rank == 0:
                save_file(loaded, out / f"{family}-{layout}-loaded.safetensors")
    shares = keep_shares(engine, view)
    save_file(shares, out / f"shares-{layout}-{view.rank}.safetensors")
    groups.stop(keep_process_group=True)


def main() -> None:
    for layout in LAYOUTS:
        run(Path(sys.argv[1]), Path(sys.argv[2]), layout)
    groups.stop()


if __name__ == "__main__":
    main()
