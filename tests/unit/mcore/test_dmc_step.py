"""Loss and gradients of a DMC step of the engine against loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.dmc.spec import DMCSpec
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import plain_dmc, tiny

SEED, BAR = 11, 2e-5
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "retrofit": ("llama", {}, {}),
    "norms": ("qwen3", {"alpha_in_loss": "soft"}, {}),
    "biases": ("qwen2", {"channel": 0}, {"loss": "lm"}),
    "short": ("llama", {"merge_window": 3}, {}),
    "uniform": ("llama", {"importance": "uniform"}, {}),
    "layer_prior": ("llama", {"prior": "layer"}, {}),
    "dmc_c": ("llama", {"preset": "dmc_c"}, {}),
    "dmc_hardc": ("llama", {"preset": "dmc_hardc"}, {}),
    "zeroing": ("llama", {}, {"eviction": "none", "channel_scale": 0.25}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_formulas(view: ParallelView, case: str) -> None:
    family, constants, planned = CASES[case]
    constants = {"preset": "dmc", "alpha_offset": 0.5, **constants}
    spec = PRESETS[constants.pop("preset")].override(**constants)
    assert isinstance(spec, DMCSpec)
    plan = StepPlan(
        **{"step": 3, "eviction": "soft", "channel_scale": 0.0, "target_cr": 8.0, **planned}
    )
    a = tiny.architecture(family, num_layers=2)
    student = tiny.SmallKeyChannels(a, 1, spec.channel, factor=0.002)
    teacher = RandomWeights(a, 2, 0.2)
    options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=SEED)
    engine = McoreEngine(a, spec, view, options, student)
    engine.attach_teacher(teacher)
    batches = [tiny.batch(0), tiny.batch(2)]
    given = dict(engine.hf_tensors())
    frozen = {name: teacher.get(name) for name in given}
    exact = plain_dmc.outcome(a, spec, plan, given, frozen, batches, SEED)
    totals, gradients = engine.forward_backward(plan, batches), engine.hf_gradients()
    assert totals.token_loss == pytest.approx(exact.token_loss, rel=BAR)
    assert totals.aux_loss == pytest.approx(exact.aux_loss, rel=BAR)
    assert totals.alpha / totals.samples == pytest.approx(exact.alpha, abs=1e-5)
    if case != "zeroing":
        assert 0.3 < exact.alpha < 0.7
        assert exact.aux_loss > 0.05
        assert totals.live / totals.samples == pytest.approx(exact.live)
    for name, gradient in exact.gradients.items():
        largest = gradient.abs().max()
        difference = (gradients[name].double() - gradient).abs().max()
        assert difference <= BAR * largest, name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_reset_makes_every_decision_minus_the_offset_and_every_weight_alike(
    view: ParallelView, family: str
) -> None:
    spec = PRESETS["dmc"]
    a = tiny.architecture(family, num_layers=2)
    options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=SEED)
    engine = McoreEngine(a, spec, view, options, RandomWeights(a, 1, 0.2))
    tokens, plan = tiny.batch(3, 1).tokens[0], StepPlan(channel_scale=0.0)
    before = engine.record(plan, tokens)
    engine.reset_eviction_channel()
    after = engine.record(StepPlan(channel_scale=0.0, eviction="hard"), tokens)
    assert before is not None
    assert after is not None
    assert (after.decision_logits == -spec.alpha_offset).all()
    if family == "llama":  # a norm of queries and keys sees the row that was there before
        torch.testing.assert_close(after.logits, before.logits, rtol=1e-5, atol=1e-5)
