"""Steps whose passes are replayed as a CUDA graph are those of eager passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from dms_train.data.batches import Batch
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions, Trainable
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS, NOT_FINITE, LENGTH = 10, 6, 128
MODES = ("never", "always")
# of losses and gradient norms: atomic sums of attention's gradient differ from run to run
BARS = {"fp32": 1e-4, "bf16": 5e-3}


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


def replayed_by_two(mode: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of one of two copies."""
    view = groups.start(ParallelOptions(), seed=1)
    engine = build(view, "dms", "fp32", mode)
    results = []
    for number in range(NOT_FINITE):
        given = batches(100 + 2 * number + view.dp_rank)
        result = engine.train_step(PLANS["retrofit"](number), given)
        results.append((result.loss, result.grad_norm))
    assert captured(engine) == (mode == "always")
    groups.stop()
    return results


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


PLANS: dict[str, Callable[[int], StepPlan]] = {
    "lm": lambda n: StepPlan(step=n, stage_step=n, loss="lm"),
    "zeroing": lambda n: StepPlan(step=n, stage_step=n, channel_scale=1 - (n + 1) / STEPS),
    "retrofit": lambda n: StepPlan(
        step=n, stage_step=n, channel_scale=0.0, eviction="soft", target_cr=1 + n / 2
    ),
    "layer_targets": lambda n: replace(PLANS["retrofit"](n), layer_weights=(0.9, 1.1)),
}


def build(
    view: ParallelView,
    preset: str,
    dtype: str,
    mode: str,
    train: str = "all",
    layers: int = 2,
    **given: Any,
) -> McoreEngine:
    architecture = tiny.architecture(
        "qwen3", num_layers=layers, kv_channels=64, max_position_embeddings=LENGTH
    )
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype=dtype, cuda_graph=mode),
        optim=OptimOptions(lr=1e-3, weight_decay=0.05),
        seed=7,
        trainable=Trainable(weights=train),
        **given,
    )
    spec = PRESETS[preset].override(alpha_offset=1.0)  # decisions on both sides of the threshold
    if spec.window:
        spec = spec.override(window=16)
    engine = McoreEngine(architecture, spec, view, options, RandomWeights(architecture, 1, 0.2))
    # with frozen weights the teacher is the student without adapters
    engine.attach_teacher(RandomWeights(architecture, 3, 0.2) if train == "all" else None)
    engine.begin_stage(
        LearningRate(max_lr=1e-3, min_lr=1e-4, steps=STEPS, warmup_steps=2, style="cosine")
    )
    return engine


def captured(engine: McoreEngine) -> bool:
    return engine._graph is not None and engine._graph._captured is not None


def train(engine: McoreEngine, plan: Callable[[int], StepPlan]) -> Run:
    steps, evaluations = [], []
    for number in range(STEPS):
        steps.append(engine.train_step(plan(number), batches(number)))
        if number in (1, 7):  # before the capture and after it
            evaluations.append(engine.evaluate(plan(number), batches(100)[:1]))
    engine.load_hf(RandomWeights(engine.architecture, 2, 0.2))
    return Run(steps, evaluations, engine.forward_backward(plan(STEPS), batches(STEPS)).loss)


CASES = [
    *(("dms", kind, dtype) for kind in PLANS for dtype in BARS),
    # the gates of trim_kv are trained with plain operations, which are not captured
    *((preset, "retrofit", "fp32") for preset in PRESETS if preset not in ("dms", "trim_kv")),
    ("dms_nvidia", "zeroing", "fp32"),
    ("dmc", "zeroing", "fp32"),
]


@pytest.mark.parametrize(("preset", "kind", "dtype"), CASES)
def test_replayed_steps_are_those_of_eager_passes(
    view: ParallelView, preset: str, kind: str, dtype: str
) -> None:
    runs = []
    for mode in MODES:
        engine = build(view, preset, dtype, mode)
        runs.append(train(engine, PLANS[kind]))
        # the plain operations that scale the channel of DMC read its factor on the host
        expected = mode == "always" and (preset[:3], kind) != ("dmc", "zeroing")
        assert captured(engine) == expected
    eager, replayed = runs
    bar = BARS[dtype]
    for number, (a, b) in enumerate(zip(eager.steps, replayed.steps, strict=True)):
        print(f"step {number}: loss {a.loss!r} {b.loss!r}, norm {a.grad_norm!r} {b.grad_norm!r}")
        assert a.skipped == b.skipped == (number == NOT_FINITE)
        assert a.learning_rate == b.learning_rate
        if number != NOT_FINITE:
            assert b.loss == pytest.approx(a.loss, rel=bar)
            assert b.aux_loss == pytest.approx(a.aux_loss, rel=10 * bar, abs=bar)
            assert b.alpha == pytest.approx(a.alpha, rel=10 * bar)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=10 * bar)
    for a, b in zip(eager.evaluations, replayed.evaluations, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=bar)
    assert replayed.loss_of_loaded == pytest.approx(eager.loss_of_loaded, rel=bar)
    losses = [step.loss for step in eager.steps]
    assert len({loss for loss in losses if math.isfinite(loss)}) == STEPS - 1  # other data each


def test_replayed_steps_of_adapters_are_those_of_eager_passes(view: ParallelView) -> None:
    runs = []
    for mode in MODES:
        engine = build(view, "dms", "fp32", mode, train="lora")
        runs.append(
            [engine.train_step(PLANS["retrofit"](n), batches(n)) for n in range(NOT_FINITE)]
        )
        assert captured(engine) == (mode == "always")
    bar = BARS["fp32"]
    for eager, replayed in zip(*runs, strict=True):
        assert replayed.loss == pytest.approx(eager.loss, rel=bar, abs=1e-6)
        assert replayed.alpha == pytest.approx(eager.alpha, rel=10 * bar)
        assert replayed.grad_norm == pytest.approx(eager.grad_norm, rel=10 * bar)
    losses = [step.loss for step in runs[0]]
    assert len(set(losses)) == NOT_FINITE  # other data each


@pytest.mark.parametrize("mode", MODES)
def test_the_layers_of_an_offloaded_teacher_arrive_before_they_run(
    view: ParallelView, mode: str
) -> None:
    """The slots of two layers serve five, in passes that are launched and in replayed ones."""
    runs = []
    for offloads in (False, True):
        engine = build(view, "dms", "fp32", mode, layers=5, offloads_teacher=offloads)
        runs.append(
            [engine.train_step(PLANS["retrofit"](n), batches(n)) for n in range(NOT_FINITE)]
        )
        runs[-1].append(engine.evaluate(PLANS["retrofit"](NOT_FINITE), batches(100)))
        assert captured(engine) == (mode == "always")
    teacher = engine._models[0]._teacher[0]
    for parameter in teacher._model.decoder.layers.parameters():
        assert parameter.data.is_pinned()
    for resident, offloaded in zip(*runs, strict=True):
        assert offloaded.loss == pytest.approx(resident.loss, rel=BARS["fp32"], abs=1e-6)


def test_another_computation_gets_a_graph_of_its_own(view: ParallelView) -> None:
    """The gradients of a stage after another are those of an engine without a graph."""
    norms = []
    for mode in ("never", "auto"):
        engine = build(view, "dms", "fp32", mode)
        for number in range(5):
            engine.forward_backward(PLANS["lm"](number), batches(number))
        assert captured(engine) == (mode == "auto")
        for number in range(5, 9):
            plan, given = PLANS["retrofit"](number), batches(number - 5)
            norms.append((number, *engine.gradients(plan, given)))
            assert captured(engine) == (mode == "auto" and number >= 7)
    for eager, replayed in zip(norms[:4], norms[4:], strict=True):
        assert replayed == pytest.approx(eager, rel=1e-3)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replayed_steps_of_two_copies_are_those_of_eager_passes() -> None:
    """Eager passes reduce gradients meanwhile, and replayed ones afterwards."""
    (eager, _), (first, second) = (values_of_ranks(replayed_by_two, 2, m) for m in MODES)
    assert first == second
    for a, b in zip(eager, first, strict=True):
        assert b == pytest.approx(a, rel=10 * BARS["fp32"])  # the bar of gradient norms
    assert len({loss for loss, _ in first}) == NOT_FINITE


def test_packed_documents_run_eagerly(view: ParallelView) -> None:
    engine = build(view, "dms", "fp32", "auto", packs_documents=True)
    given = [tiny.packed(tiny.batch(0, length=LENGTH), [[LENGTH - 8, 8], [LENGTH]])]
    for number in range(3):
        engine.forward_backward(PLANS["retrofit"](number), given)
    assert not captured(engine)


def test_kernels_that_read_the_plan_on_the_host_run_eagerly_or_are_refused(
    view: ParallelView,
) -> None:
    engine = build(view, "dms", "fp32", "auto", kernels="blockwise")
    for number in range(4):
        engine.forward_backward(PLANS["retrofit"](number), batches(number))
    assert not captured(engine)
    with pytest.raises(ModelError, match="set kernels=triton"):
        build(view, "dms", "fp32", "always", kernels="blockwise")
