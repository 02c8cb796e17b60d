"""The optimizer in host memory takes the steps of the one on the device, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.mcore import compat, groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.host_adam import HostAdamW
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.schedule import optimizer as optim
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
ARCHITECTURE = tiny.architecture("qwen2")
RATE = LearningRate(max_lr=1e-3, min_lr=1e-4, steps=9, warmup_steps=3, style="cosine")


def build(view: ParallelView, parallel: ParallelOptions, *, offload: bool) -> McoreEngine:
    settings = OptimOptions(lr=1e-3, clip_grad=0.5, weight_decay=0.1)
    options = TrainEngineOptions(parallel=parallel, optim=settings, seed=7)
    weights = RandomWeights(ARCHITECTURE, 1, 0.05)
    engine = McoreEngine(ARCHITECTURE, PRESETS["dms"], view, options, weights)
    if offload:  # an engine refuses it without a GPU
        settings = replace(settings, offload=True)
        engine._optimizer = optim.build_optimizer(settings, engine._config, engine._chunks)
        parts = compat.optimizer_parts(engine._optimizer)
        assert all(isinstance(part.optimizer, HostAdamW) for part in parts)
    engine.begin_stage(RATE)
    return engine


def train(engine: McoreEngine, view: ParallelView, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        plan = StepPlan(step=step, stage_step=step, loss="lm")
        result = engine.train_step(plan, tiny.microbatches(view.dp_rank, view.dp_size))
        found += [result.loss, result.grad_norm, result.learning_rate]
    return found


def work(out: Path) -> dict[str, list[list[float]]]:
    found = {}
    for name, layout in LAYOUTS.items():
        parallel = ParallelOptions(params_dtype="bf16", **layout)
        view = groups.start(parallel, seed=1)
        host, device, resumed = (build(view, parallel, offload=o) for o in (True, False, False))
        first = [train(engine, view, 0, 3) for engine in (host, device)]
        host.save(out / name, {})
        resumed.load(out / name, with_optimizer=True)
        resumed.begin_stage(RATE)
        found[name] = [*first, *(train(e, view, 3, 5) for e in (host, device, resumed))]
        groups.stop(keep_process_group=True)
    groups.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    return values_of_ranks(work, 2, tmp_path_factory.mktemp("host_adam"))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_and_checkpoints_are_those_of_the_device(name: str, found: dict[str, Any]) -> None:
    host, device, later_host, later_device, resumed = found[name]
    assert host[1] > 0.5  # gradients are clipped
    assert host == pytest.approx(device, rel=2e-3)
    assert later_host == pytest.approx(later_device, rel=2e-3)
    assert resumed == pytest.approx(later_host, rel=2e-3)
    assert later_host[0] < host[0]
