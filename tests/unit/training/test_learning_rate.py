"""Learning rates of each stage's steps, through megatron's scheduler."""

from __future__ import annotations

import math

import pytest
import torch

from dms_train.mcore.schedule import optimizer as optim
from dms_train.method.plan import LearningRate

PEAK = 3e-4


def rates(rate: LearningRate, order: list[int] | None = None) -> list[float]:
    """The optimizer's learning rate at each stage step, in a given order."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=123.0)
    scheduler = optim.build_scheduler(optimizer, rate, weight_decay=0.1)
    seen = {}
    for step in order or range(rate.steps):
        optim.set_step(scheduler, step)
        seen[step] = optimizer.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return [seen[step] for step in sorted(seen)]


def constant(steps: int, warmup: int) -> LearningRate:
    return LearningRate(
        max_lr=PEAK, min_lr=PEAK, steps=steps, warmup_steps=warmup, style="constant"
    )


def cosine(steps: int, warmup: int = 0) -> LearningRate:
    return LearningRate(
        max_lr=PEAK, min_lr=PEAK / 10, steps=steps, warmup_steps=warmup, style="cosine"
    )


def test_constant_is_constant_from_the_first_step_to_the_last() -> None:
    assert rates(constant(50, 0)) == [PEAK] * 50


def test_warm_up_rises_linearly_and_reaches_the_peak_at_its_last_step() -> None:
    expected = [PEAK * (step + 1) / 4 for step in range(4)] + [PEAK] * 6
    assert rates(constant(10, 4)) == pytest.approx(expected)


def test_cosine_falls_to_a_tenth_in_the_last_step() -> None:
    got = rates(cosine(20))
    low = PEAK / 10
    expected = [
        low + (PEAK - low) * (1 + math.cos(math.pi * (step + 1) / 20)) / 2 for step in range(20)
    ]
    assert got == pytest.approx(expected)
    assert got[-1] == pytest.approx(low)
    assert got[9] == pytest.approx((PEAK + low) / 2)


def test_cosine_after_a_warm_up_starts_at_the_peak() -> None:
    got = rates(cosine(12, 4))
    assert got[:4] == pytest.approx([PEAK * (step + 1) / 4 for step in range(4)])
    assert max(got) == pytest.approx(PEAK)
    assert got[4:] == sorted(got[4:], reverse=True)
    assert got[-1] == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("rate", [constant(8, 3), cosine(8, 3), cosine(8)])
def test_rate_depends_on_the_step_alone(rate: LearningRate) -> None:
    assert rates(rate, order=[7, 0, 3, 1, 6, 2, 5, 4]) == rates(rate)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_stage_shorter_than_its_warm_up_still_works(steps: int) -> None:
    got = rates(constant(steps, 100))
    assert len(got) == steps
    assert got[-1] == pytest.approx(PEAK)


def test_a_second_stage_replaces_the_rates_of_the_first() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optim.set_step(optim.build_scheduler(optimizer, constant(5, 0), 0.0), 0)
    half = LearningRate(max_lr=PEAK / 2, min_lr=PEAK / 2, steps=5, warmup_steps=0, style="constant")
    optim.set_step(optim.build_scheduler(optimizer, half, 0.0), 0)
    assert optimizer.param_groups[0]["lr"] == PEAK / 2
