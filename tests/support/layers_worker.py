"""Two training steps and a checkpoint with one kind of layers, or a third step after loading one.

python -m tests.support.layers_worker KIND CHECKPOINT OUT [--load]

KIND: `torch` (Transformer Engine hidden from megatron), `local` or `transformer_engine`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["torch"]:
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

import torch
from safetensors.torch import save_file

from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

LR = 1e-3


def build(
    layers: str, family: str, view: Any = None, dtype: str = "fp32", **options: Any
) -> McoreEngine:
    parallel = ParallelOptions(layers=layers, params_dtype=dtype, **options)
    view = view or groups.start(parallel, seed=1)
    # sizes that the fused products take
    architecture = tiny.architecture(
        family, num_layers=2, hidden_size=64, ffn_hidden_size=96, kv_channels=16
    )
    spec = PRESETS["dms"].override(window=4, alpha_offset=0.5)
    settings = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=LR), seed=7)
    weights = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.002)
    engine = McoreEngine(architecture, spec, view, settings, weights)
    rate = LearningRate(max_lr=LR, min_lr=LR, steps=9, warmup_steps=0, style="constant")
    engine.begin_stage(rate)
    return engine


def step(engine: McoreEngine, number: int) -> float:
    plan = StepPlan(
        step=number,
        stage_step=number,
        loss="lm",
        eviction="soft",
        channel_scale=0.0,
        target_cr=4.0,
    )
    return engine.train_step(plan, tiny.microbatches(0, 1, groups=2)).loss


def tensors(engine: McoreEngine) -> dict[str, torch.Tensor]:
    return {name: t.clone().contiguous() for name, t in engine.hf_tensors()}


def recorded(engine: McoreEngine) -> dict[str, list[str]]:
    """Names of one layer's parameters, and of what a checkpoint stores of it."""
    model = engine._models[0]
    state = model.sharded_state_dict(metadata={"dp_cp_group": engine.view.dp_group})
    return {
        "parameters": sorted(n for n, _ in model.named_parameters() if ".layers.0." in n),
        "checkpoint": sorted({part.key for part in state.values() if ".layers." in part.key}),
    }


def main() -> None:
    kind, checkpoint, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    engine = build("local" if kind == "torch" else kind, "qwen2")
    if "--load" in sys.argv:
        engine.load(checkpoint, with_optimizer=True)
    else:
        for number in range(2):
            step(engine, number)
        engine.save(checkpoint, {"permanent": True})
    before, loss = tensors(engine), step(engine, 2)
    save_file({f"before.{n}": t for n, t in before.items()}, out / "before.safetensors")
    save_file({f"after.{n}": t for n, t in tensors(engine).items()}, out / "after.safetensors")
    described = {"loss": loss, "layers": engine.describe_layers()}
    (out / "outcome.json").write_text(json.dumps(described))
    groups.stop()


if __name__ == "__main__":
    main()
