"""`experiment=qwen3_8b_nvidia`: the values and the objective of NVIDIA's training code."""

from __future__ import annotations

from typing import Any

import pytest

from dms_train.cli.config_source import compose
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.token_losses import LossOptions
from dms_train.training.stages import Stage, build_stages
from tests.support import plain_objective, tiny

CONFIG = compose(["experiment=qwen3_8b_nvidia", "model.path=Qwen/Qwen3-8B", "data.paths=[corpus]"])
EOS, SEED = 5, 7
# experimental/dms/configs/qwen3_8b.yaml of Model-Optimizer
THEIRS = {
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "window": 512,
    "tau": 0.1,
    "lr": 3e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,  # torch's default
    "clip_grad": 1.0,
    "lr_warmup_steps": 0,
    "seq_length": 32768,
    "global_batch_size": 8,  # one sequence on each of eight GPUs
    "eod_mask_loss": True,
    "kl_direction": "student_teacher",
    "kl_temperature": 1.0,
    "train": "channel",
    "alpha_in_loss": "hard_st",
    "aux_form": "mean",
}


def their_ratio(step: int) -> float:
    """The `dms_schedule` of their engine: initial_cr 1, final_cr 16, final_step 510."""
    return 1.0 + (16.0 - 1.0) * min(step / 510, 1.0)


def test_the_values_are_theirs() -> None:
    blocks = (CONFIG.method, CONFIG.optim, CONFIG.data, CONFIG.loss)
    found = {
        key: next(getattr(block, key) for block in blocks if hasattr(block, key)) for key in THEIRS
    }
    assert found == THEIRS
    assert CONFIG.stage.export.format == "nvidia"


def test_the_schedule_is_theirs_one_step_earlier() -> None:
    stages: list[Any] = [
        stage
        for stage in build_stages(CONFIG.stage, CONFIG.optim.lr_warmup_steps)
        if isinstance(stage, Stage)
    ]
    plans = [stage.plan(0, step) for stage in stages for step in range(stage.steps)]
    assert len(plans) == 544
    assert [plan.target_cr for plan in plans] == pytest.approx(
        [their_ratio(step + 1) for step in range(544)]
    )
    assert {plan.loss for plan in plans} == {"distill"}
    rates = {(stage.rate.max_lr, stage.rate.min_lr, stage.rate.warmup_steps) for stage in stages}
    assert rates == {(3e-5, 3e-5, 0)}


def test_the_loss_is_kl_from_the_student_over_inputs_that_end_no_document(
    view: ParallelView,
) -> None:
    architecture = tiny.architecture("qwen3", num_layers=2)
    method = CONFIG.method.override(window=4, alpha_offset=0.5)
    source = tiny.SmallEvictionChannels(architecture, 1, method.channel)
    options = TrainEngineOptions(
        parallel=ParallelOptions(),
        optim=OptimOptions(lr=CONFIG.optim.lr),
        seed=SEED,
        loss=CONFIG.loss,
        trainable=CONFIG.trainable,
    )
    engine = McoreEngine(architecture, method, view, options, source)
    engine.attach_teacher(None)
    batch = tiny.batch(0, size=4)
    batch = batch._replace(loss_mask=(batch.tokens != EOS).float())
    assert (batch.tokens == EOS).sum() > 0
    plan = StepPlan(step=3, stage_step=3, channel_scale=0.0, eviction="soft", target_cr=4.0)
    student = dict(engine.hf_tensors())
    exact = plain_objective.outcome(
        *(architecture, method, plan, student, {n: source.get(n) for n in student}, [batch], SEED),
        loss=LossOptions(kl_direction="student_teacher"),
    )
    totals = engine.forward_backward(plan, [batch])
    assert totals.token_loss == pytest.approx(exact.token_loss, rel=1e-4)
    assert totals.aux_loss == pytest.approx(exact.aux_loss, rel=1e-4)
    trained = {
        name.rpartition(".")[2]
        for name, p in engine._models[0].named_parameters()
        if p.requires_grad
    }
    assert trained == {"channel_weight"}
