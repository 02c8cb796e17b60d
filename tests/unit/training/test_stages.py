"""Each stage has the learning rate of its own block, and its plans the targets of layers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from dms_train.method.plan import StepPlan
from dms_train.training.options import (
    ExportOptions,
    HoldOptions,
    PretrainOptions,
    RetrofitOptions,
    StageOptions,
    ZeroNeuronOptions,
)
from dms_train.training.stages import Stage, build_stages

COMMON, OWN = 1e-4, 7e-5
OPTIONS = StageOptions(
    run=("pretrain", "zero_neuron", "retrofit", "hold"),
    pretrain=PretrainOptions(steps=2, lr=COMMON, min_lr_ratio=0.5),
    zero_neuron=ZeroNeuronOptions(steps=3, lr=COMMON),
    retrofit=RetrofitOptions(target_cr=4.0, steps_per_cr=2, lr=COMMON),
    hold=HoldOptions(steps=3, lr=COMMON, min_lr_ratio=0.25),
    export=ExportOptions(),
)
# share of the highest learning rate that a stage ends with
LOWEST = {"pretrain": 0.5, "zero_neuron": 1.0, "retrofit": 1.0, "hold": 0.25}


def rates(options: StageOptions) -> dict[str, Any]:
    stages = build_stages(options, warmup=1)
    return {stage.name: stage.rate for stage in stages if isinstance(stage, Stage)}


@pytest.mark.parametrize("name", OPTIONS.run)
def test_a_learning_rate_of_its_own_holds_for_that_stage_alone(name: str) -> None:
    found = rates(replace(OPTIONS, **{name: replace(getattr(OPTIONS, name), lr=OWN)}))
    assert {stage: rate.max_lr for stage, rate in found.items()} == {
        stage: OWN if stage == name else COMMON for stage in OPTIONS.run
    }
    assert found[name].min_lr == pytest.approx(OWN * LOWEST[name])


def test_layers_keep_their_proportions_in_every_stage_that_evicts() -> None:
    retrofit = replace(OPTIONS.retrofit, layer_ratios={1: 8.0})
    hold = replace(OPTIONS.hold, branch_ratios=(2,))
    stages = build_stages(replace(OPTIONS, retrofit=retrofit, hold=hold), 0, layers=[0, 1])
    built = {stage.name: stage for stage in stages if isinstance(stage, Stage)}
    # the shares 5/8 and 7/8 of a mean of 3/4
    expected = pytest.approx((5 / 6, 7 / 6))
    evicting = [built["retrofit"], built["hold"], built["retrofit"].branches[2]]
    assert all(stage.plan(0, 0).layer_weights == expected for stage in evicting)
    assert built["zero_neuron"].plan(0, 0).layer_weights == ()
    plan = built["hold"].plan(3, 2)  # as a skipped step stores it
    assert StepPlan.from_dict(json.loads(json.dumps(asdict(plan)))) == plan


def test_immediate_annealing_takes_the_same_steps_at_the_final_ratio() -> None:
    linear, immediate = (
        stage
        for kind in ("linear", "immediate")
        for stage in build_stages(
            replace(OPTIONS, retrofit=replace(OPTIONS.retrofit, annealing=kind)), warmup=1
        )
        if isinstance(stage, Stage) and stage.name == "retrofit"
    )
    ratios = [[s.plan(n, n).target_cr for n in range(s.steps)] for s in (linear, immediate)]
    assert ratios == [[1.5, 2.0, 2.5, 3.0, 3.5, 4.0], [4.0] * 6]
    assert [immediate.integer_passed(n) for n in range(1, 7)] == [None] * 6


@pytest.mark.parametrize("target", [2.0, 3.7, 6.0])
@pytest.mark.parametrize("start", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("steps_per_cr", [1, 3, 7, 10])
def test_the_steps_of_integer_ratios_are_those_that_pass_one(
    start: float, target: float, steps_per_cr: int
) -> None:
    own = RetrofitOptions(target_cr=target, steps_per_cr=steps_per_cr, start_cr=start, lr=COMMON)
    stages = build_stages(replace(OPTIONS, run=("retrofit", "hold"), retrofit=own), warmup=0)
    for stage in stages:
        assert isinstance(stage, Stage)
        passed = [(step, stage.integer_passed(step)) for step in range(1, stage.steps)]
        assert [*stage.integer_steps()] == [each for each in passed if each[1] is not None]
