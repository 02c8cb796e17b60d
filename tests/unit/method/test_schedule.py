"""The ramps of the recipe have the values of the paper."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dms_train.method import schedule


@pytest.mark.parametrize(
    ("step", "ratio"), [(0, 1.0), (1, 1.01), (100, 2.0), (150, 2.5), (300, 4.0), (301, 4.0)]
)
def test_ratio_grows_by_one_in_a_hundred_steps_up_to_four(step: int, ratio: float) -> None:
    assert schedule.compression_ratio(step, 100, 4.0) == pytest.approx(ratio, abs=1e-12)


def test_layers_without_a_ratio_share_what_the_others_leave_of_the_mean() -> None:
    """Four layers evict half on the mean: nothing, 3/4, and two times what is left of 2."""
    weights = schedule.layer_weights({0: 1.0, 3: 4.0}, 2.0, [0, 1, 3, 4])
    # the method does not act on layer 2
    assert [0.5 * weight for weight in weights] == pytest.approx([0.0, 0.625, 0.0, 0.75, 0.625])
    whole = schedule.layer_weights({0: 3.0, 1: 1.5}, 2.0, [0, 1])
    assert [0.5 * weight for weight in whole] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("ratios", "target", "line"),
    [
        ({0: 1.0, 1: 1.0}, 2.0, "the other 1 layer(s) would have to evict 150% of their tokens"),
        ({0: 100.0, 1: 100.0}, 2.0, "the other 1 layer(s) would have to evict -48% of"),
        ({0: 2.0, 1: 2.0, 2: 4.0}, 2.0, "all layers together have CR 2.4; set target_cr to it"),
        ({0: 1.0}, 1.0, "nothing is evicted at a target_cr of 1; raise it"),
        ({7: 2.0}, 2.0, "the method does not act on layer 7; leave it out"),
    ],
)
def test_ratios_that_give_no_such_mean_are_refused(
    ratios: dict[int, float], target: float, line: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        schedule.layer_weights(ratios, target, [0, 1, 2])


def test_from_one_to_four_takes_three_hundred_steps() -> None:
    assert schedule.anneal_steps(100, 4.0) == 300
    assert schedule.anneal_steps(100, 8.0) == 700
    assert schedule.anneal_steps(100, 8.0, start=4.0) == 400
    assert schedule.anneal_steps(100, 4.0, start=4.0) == 0


@given(
    steps_per_cr=st.integers(1, 500),
    tenths=st.integers(10, 200),
    start_tenths=st.integers(10, 100),
)
def test_annealing_takes_the_fewest_steps_that_reach_the_target(
    steps_per_cr: int, tenths: int, start_tenths: int
) -> None:
    target, start = max(tenths, start_tenths) / 10, start_tenths / 10
    steps = schedule.anneal_steps(steps_per_cr, target, start)
    reached = schedule.compression_ratio(steps, steps_per_cr, target, start)
    assert reached == pytest.approx(target, abs=1e-9)
    if steps:
        before = schedule.compression_ratio(steps - 1, steps_per_cr, target, start)
        assert before < target - 1e-9


def test_the_channel_scale_falls_linearly_to_exactly_zero() -> None:
    factors = [schedule.channel_scale(step, 2000) for step in range(2002)]
    assert factors[0] == 1.0
    assert factors[100] == pytest.approx(0.95)
    assert factors[1000] == 0.5
    assert factors[1999] == pytest.approx(0.0005)
    assert factors[2000] == factors[2001] == 0.0
    assert factors == sorted(factors, reverse=True)


def test_a_ramp_without_steps_is_already_zero() -> None:
    assert schedule.channel_scale(0, 0) == 0.0


@pytest.mark.parametrize(("ratio", "share"), [(1.0, 0.0), (2.0, 0.5), (4.0, 0.75), (8.0, 0.875)])
def test_evicted_share_is_one_less_the_inverse_ratio(ratio: float, share: float) -> None:
    assert schedule.evicted_fraction(ratio) == share
