"""A step with the stored distributions of a teacher is the step with the teacher itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.token_losses import LossOptions
from tests.support import tiny

PLAN = StepPlan(step=3, eviction="soft", channel_scale=0.0, target_cr=2.0, loss="distill")
OPTIONS = TrainEngineOptions(
    parallel=ParallelOptions(),
    optim=OptimOptions(lr=1e-3),
    seed=7,
    loss=LossOptions(kl_temperature=2.0),
)
ARCHITECTURE = tiny.architecture("qwen2", num_layers=2)
SPEC = PRESETS["dms"].override(window=4)
ORIGINAL = RandomWeights(ARCHITECTURE, 2, 0.2)


def student(view: ParallelView, **changes: Any) -> McoreEngine:
    weights = tiny.small_channels(SPEC.kind)(ARCHITECTURE, 1, SPEC.channel)
    return McoreEngine(ARCHITECTURE, SPEC, view, replace(OPTIONS, **changes), weights)


@pytest.fixture(scope="module")
def batches(view: ParallelView) -> list[Batch]:
    """Micro-batches with all probabilities of the teacher."""
    teacher = McoreEngine(ARCHITECTURE, SPEC, view, replace(OPTIONS, trains=False), ORIGINAL)
    plain = tiny.microbatches(0, 1, groups=2)
    stored = teacher.top_logits(plain, ARCHITECTURE.vocab_size)
    return [batch._replace(teacher=top) for batch, top in zip(plain, stored, strict=True)]


def outcome(engine: McoreEngine, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    loss = engine.forward_backward(PLAN, batches).loss
    return loss, engine.hf_gradients()


def test_losses_and_gradients_are_those_of_the_teacher(
    view: ParallelView, batches: list[Batch]
) -> None:
    live = student(view)
    live.attach_teacher(ORIGINAL)
    exact_loss, exact = outcome(live, [batch._replace(teacher=None) for batch in batches])
    loss, gradients = outcome(student(view, reads_teacher=True), batches)
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_teacher_in_bf16_is_stored_and_read(view: ParallelView, batches: list[Batch]) -> None:
    in_bf16 = {"parallel": ParallelOptions(params_dtype="bf16")}
    options = replace(OPTIONS, trains=False, **in_bf16)
    teacher = McoreEngine(ARCHITECTURE, SPEC, view, options, ORIGINAL)
    plain = [batch._replace(teacher=None) for batch in batches]
    stored = teacher.top_logits(plain, 8)
    for top, batch in zip(stored, batches, strict=True):
        exact = batch.teacher
        assert exact is not None
        probabilities = torch.zeros(*exact.ids.shape, dtype=torch.float64)
        probabilities.scatter_(-1, exact.ids.long(), exact.log_probs.double().exp())
        found = top.log_probs.double().exp()
        whole = found.sum(-1) + top.log_tails.double().exp()
        torch.testing.assert_close(whole, torch.ones_like(whole), rtol=0, atol=1e-2)
        error = found - probabilities.gather(-1, top.ids.long())
        assert error.abs().max() < 0.05  # of bf16 weights and activations
    live = student(view, **in_bf16)
    live.attach_teacher(ORIGINAL)
    read = [b._replace(teacher=top) for b, top in zip(plain, stored, strict=True)]
    loss = outcome(student(view, reads_teacher=True, **in_bf16), read)[0]
    # merged outcomes bound the divergence of the whole distributions from below
    assert 0.5 * outcome(live, plain)[0] < loss <= 1.02 * outcome(live, plain)[0]


def test_a_stored_teacher_also_ranks_the_eviction_channels(
    view: ParallelView, batches: list[Batch]
) -> None:
    live = student(view)
    live.attach_teacher(ORIGINAL)
    first = [batch.first(1, 8) for batch in batches]
    losses = student(view, reads_teacher=True).channel_losses([0, 3], first)
    exact = live.channel_losses([0, 3], [batch._replace(teacher=None) for batch in first])
    assert losses == pytest.approx(exact, rel=1e-4)


def test_a_batch_without_them_is_refused(view: ParallelView) -> None:
    engine = student(view, reads_teacher=True)
    with pytest.raises(ModelError, match="needs a teacher"):
        engine.evaluate(PLAN, tiny.microbatches(0, 1, groups=1))
