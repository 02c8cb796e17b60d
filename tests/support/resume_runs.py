"""Training in one go, with a save and a load in between, and with another layout after the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dms_train.mcore import compat, groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.matrix import FULL_MATRIX

PROCESSES = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "pp2_vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    # of a model with experts
    "moe_ep2": {"expert_model_parallel_size": 2},
    "moe_tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
SAME = [
    ("dp2", "bf16"),
    ("pp2_vp2", "fp32"),
    ("cp2", "fp32"),
    ("tp2_sp", "bf16"),
    ("moe_ep2", "fp32"),
]
# saved in one layout, continued in another
OTHER = [
    ("pp2_vp2", "tp2", "fp32"),
    ("cp2", "dp2", "fp32"),
    ("dp2", "tp2_sp", "bf16"),
    ("tp2_sp", "pp2", "bf16"),
    ("moe_ep2", "moe_tp2_sp", "fp32"),
]
if FULL_MATRIX:
    SAME += [("dp2", "fp32"), ("tp2", "fp32"), ("tp2_sp", "fp32")]
    OTHER += [
        ("dp2", "tp2_sp", "fp32"),
        ("tp2", "pp2", "fp32"),
        ("tp2", "dp2", "fp32"),
        ("dp2", "pp2_vp2", "fp32"),
        ("cp2", "tp2", "fp32"),
        ("tp2_sp", "dp2", "bf16"),
        ("dp2", "pp2", "bf16"),
    ]
HALF, STEPS = 2, 4
# a rate that changes at every step
RATE = LearningRate(max_lr=2e-3, min_lr=2e-4, steps=STEPS, warmup_steps=2, style="cosine")
SPEC = PRESETS["dms"].override(window=4, alpha_offset=0.5)


def build(layout: str, dtype: str, view: ParallelView, seed: int) -> McoreEngine:
    architecture = tiny.architecture("qwen3_moe" if "moe" in layout else "qwen2", num_layers=4)
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype=dtype, **LAYOUTS[layout]),
        optim=OptimOptions(lr=1e-3, weight_decay=0.01),
        seed=7,
    )
    student = tiny.SmallEvictionChannels(architecture, seed, SPEC.channel)
    engine = McoreEngine(architecture, SPEC, view, options, student)
    engine.attach_teacher(RandomWeights(architecture, 2, 0.2))
    engine.begin_stage(RATE)
    return engine


def train(engine: McoreEngine, first: int, last: int) -> list[dict[str, float]]:
    """Steps first .. last - 1, each on its own samples."""
    rows = []
    for step in range(first, last):
        batches = [
            tiny.batch(4 * step + 2 * group)
            for group in range(engine.view.dp_rank, 2, engine.view.dp_size)
        ]
        plan = StepPlan(
            step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0
        )
        result = engine.train_step(plan, batches)
        rows.append(
            {
                "loss": result.loss,
                "alpha": result.alpha,
                "grad_norm": result.grad_norm,
                "lr": result.learning_rate,
            }
        )
    return rows


def keep(engine: McoreEngine, rows: list[dict[str, float]], path: Path) -> None:
    weights = dict(engine.hf_tensors())
    if engine.view.rank == 0:
        save_file(weights, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(rows))


def same_layout(layout: str, dtype: str, view: ParallelView, out: Path) -> None:
    """In one go; then half, a checkpoint, and the other half in a fresh engine."""
    name, checkpoint = f"{layout}-{dtype}", out / f"{layout}-{dtype}-checkpoint"
    engine = build(layout, dtype, view, 1)
    keep(engine, train(engine, 0, STEPS), out / f"{name}-whole")
    engine = build(layout, dtype, view, 1)
    rows = train(engine, 0, HALF)
    engine.save(checkpoint, {"step": HALF}, wait=False)  # written while the weights change
    keep(engine, rows + train(engine, HALF, STEPS), out / f"{name}-saved")
    assert engine.finish_save(wait=True) == checkpoint
    assert engine.load(checkpoint, with_optimizer=True)["step"] == HALF  # as after a branch
    engine.begin_stage(RATE)
    keep(engine, train(engine, HALF, STEPS), out / f"{name}-returned")
    engine = build(layout, dtype, view, 55)
    assert engine.load(checkpoint, with_optimizer=True)["step"] == HALF
    keep(engine, train(engine, HALF, STEPS), out / f"{name}-resumed")


def fp32_weights(engine: McoreEngine) -> list[torch.Tensor]:
    """Copies of this rank's share of the weights that the optimizer updates."""
    compat.create_optimizer_state(engine._optimizer)  # reading would leave an incomplete one
    return [
        compat.parameter_state(part, parameter)["param"].detach().clone()
        for part in compat.optimizer_parts(engine._optimizer)
        for parameter in part.model_param_group_index_map
    ]


def other_layout(source: str, layout: str, dtype: str, view: ParallelView, out: Path) -> None:
    engine = build(layout, dtype, view, 55)
    checkpoint = out / f"{source}-{dtype}-checkpoint"
    engine.load(checkpoint, with_optimizer=False)
    alone = fp32_weights(engine)
    engine.load(checkpoint, with_optimizer=True)
    for found, whole in zip(alone, fp32_weights(engine), strict=True):
        assert torch.equal(found, whole)
    keep(engine, train(engine, HALF, STEPS), out / f"{source}-to-{layout}-{dtype}")


def work(out: Path) -> None:
    """Train, save and resume in every layout; results are written to `out`."""
    torch.use_deterministic_algorithms(mode=True)
    for layout, dtype in SAME:
        view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
        same_layout(layout, dtype, view, out)
        groups.stop(keep_process_group=True)
    for source, layout, dtype in OTHER:
        view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
        other_layout(source, layout, dtype, view, out)
        groups.stop(keep_process_group=True)
    groups.stop()
