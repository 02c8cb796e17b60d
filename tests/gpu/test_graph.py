"""Steps whose passes are replayed as a CUDA graph are those of eager passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from dms_train.data.batches import Batch
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS, NOT_FINITE, LENGTH = 10, 6, 128
# of losses and gradient norms: atomic sums of attention's gradient differ from run to run
BARS = {"fp32": 1e-4, "bf16": 5e-3}


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


class Run(NamedTuple):
    """A training of a few steps: results, and the loss after other weights were loaded."""

    steps: list[StepResult]
    evaluations: list[StepResult]
    loss_of_loaded: float


def batches(step: int) -> list[Batch]:
    """Two microbatches with uneven masks; those of one step make the loss infinite."""
    made = [tiny.batch(4 * step + 2 * number, length=LENGTH) for number in range(2)]
    if step == NOT_FINITE:
        made[1].loss_mask[0, -1] = math.inf
    return made


def train(view: ParallelView, dtype: str, *, cuda_graph: bool) -> Run:
    architecture = tiny.architecture(
        "qwen3", num_layers=2, kv_channels=64, max_position_embeddings=LENGTH
    )
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype=dtype),
        optim=OptimOptions(lr=1e-3, weight_decay=0.05),
        seed=7,
        cuda_graph=cuda_graph,
    )
    source = RandomWeights(architecture, 1, 0.2)
    engine = McoreEngine(architecture, PRESETS["dms"], view, options, source)
    engine.begin_stage(
        LearningRate(max_lr=1e-3, min_lr=1e-4, steps=STEPS, warmup_steps=2, style="cosine")
    )
    steps, evaluations = [], []
    for number in range(STEPS):
        plan = StepPlan(step=number, stage_step=number, loss="lm")
        steps.append(engine.train_step(plan, batches(number)))
        if number in (1, 7):  # before the capture and after it
            evaluations.append(engine.evaluate(plan, batches(100)[:1]))
    assert (engine._graph is not None and engine._graph._captured is not None) == cuda_graph
    engine.load_hf(RandomWeights(architecture, 2, 0.2))
    plan = StepPlan(step=STEPS, stage_step=STEPS, loss="lm")
    return Run(steps, evaluations, engine.forward_backward(plan, batches(STEPS)).loss)


@pytest.mark.parametrize("dtype", BARS)
def test_replayed_steps_are_those_of_eager_passes(view: ParallelView, dtype: str) -> None:
    eager, replayed = (train(view, dtype, cuda_graph=graph) for graph in (False, True))
    bar = BARS[dtype]
    for number, (a, b) in enumerate(zip(eager.steps, replayed.steps, strict=True)):
        print(f"step {number}: loss {a.loss!r} {b.loss!r}, norm {a.grad_norm!r} {b.grad_norm!r}")
        assert a.skipped == b.skipped == (number == NOT_FINITE)
        assert a.learning_rate == b.learning_rate
        if number != NOT_FINITE:
            assert b.loss == pytest.approx(a.loss, rel=bar)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=10 * bar)
    for a, b in zip(eager.evaluations, replayed.evaluations, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=bar)
    assert replayed.loss_of_loaded == pytest.approx(eager.loss_of_loaded, rel=bar)
    losses = [step.loss for step in eager.steps]
    assert len({loss for loss in losses if math.isfinite(loss)}) == STEPS - 1  # other data each


def test_a_stage_after_pretrain_computes_eagerly(view: ParallelView) -> None:
    """Its plan differs; the gradients are those of an engine without a graph."""
    architecture = tiny.architecture("qwen3", num_layers=2, kv_channels=64)
    norms = []
    for cuda_graph in (False, True):
        options = TrainEngineOptions(
            parallel=ParallelOptions(),
            optim=OptimOptions(lr=1e-3),
            seed=7,
            cuda_graph=cuda_graph,
        )
        source = RandomWeights(architecture, 1, 0.2)
        engine = McoreEngine(architecture, PRESETS["dms"], view, options, source)
        for number in range(5):
            engine.forward_backward(StepPlan(step=number, loss="lm"), tiny.microbatches(0, 1))
        assert (engine._graph is not None and engine._graph._captured is not None) == cuda_graph
        plan = StepPlan(step=5, loss="lm", neuron_scale=0.5)
        norms.append(engine.gradients(plan, tiny.microbatches(0, 1)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
