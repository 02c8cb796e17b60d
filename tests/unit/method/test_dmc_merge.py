"""Merged keys and values of DMC: worked examples, and the recurrence of the paper in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dms_train.method.accounting import live_slots
from dms_train.method.dmc.merge import merge
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import align_to_keys, visible

SPEC = PRESETS["dmc"]


def recurrence(k: Tensor, alpha: Tensor, weight: Tensor, width: int) -> Tensor:
    """Every state from an empty slot `width` tokens back, one token at a time (section 3.2)."""
    states = torch.empty_like(k)
    for i in range(len(k)):
        average, z = torch.zeros_like(k[0]), torch.zeros_like(weight[0])
        for j in range(max(0, i - width + 1), i + 1):
            before = alpha[j] * z
            z = before + weight[j]
            average = (average * before[..., None] + k[j] * weight[j][..., None]) / z[..., None]
        states[i] = average
    return states


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_the_worked_example_of_hard_decisions() -> None:
    """Four tokens with decisions 0, 1, 0, 1 end in the slots 2.0 and 4.4."""
    k, alpha, weight = column(1, 3, 5, 2), column(0, 1, 0, 1), column(0.5, 0.5, 1, 0.25)
    states, _ = merge(k[..., None], k[..., None], alpha, weight, 12)
    last = visible(alpha.t() > 0, SPEC)[0, -1]
    assert states[last].flatten().tolist() == pytest.approx([2.0, 4.4])
    assert live_slots(alpha.t() > 0, SPEC).tolist() == [[1, 1, 2, 2]]


def test_the_worked_example_of_soft_decisions() -> None:
    k, alpha, weight = column(1, 3, 5), column(0, 0.5, 0.5), column(0.5, 0.5, 1)
    states, _ = merge(k[..., None], k[..., None], alpha, weight, 12)
    assert states.flatten().tolist() == pytest.approx([1, 2.3333, 4.2727], abs=1e-4)
    by_key = align_to_keys(torch.log1p(-alpha.t()), SPEC, keep=0.0)
    assert by_key[0, 0].item() == pytest.approx(math.log(0.5))
    assert SPEC.window == 0  # so that the mask begins at the very next token


@pytest.mark.parametrize("hard", [True, False])
@settings(deadline=None, max_examples=25)
@given(length=st.integers(1, 30), width=st.sampled_from([1, 2, 5, 12]), seed=st.integers(0, 99))
def test_every_state_is_that_of_the_recurrence(
    hard: bool, length: int, width: int, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    alpha, weight = torch.rand(2, length, 2, 3, generator=draws, dtype=torch.float64)
    alpha = (alpha < 0.7).double() if hard else alpha
    alpha[0] = 0
    weight = weight + 0.05
    k, v = torch.randn(2, length, 2, 3, 4, generator=draws, dtype=torch.float64)
    found = merge(k, v, alpha, weight, width)
    for states, tokens in zip(found, (k, v), strict=True):
        torch.testing.assert_close(states, recurrence(tokens, alpha, weight, width))


def test_a_state_lies_between_its_tokens() -> None:
    draws = torch.Generator().manual_seed(0)
    k = torch.randn(40, 1, 8, generator=draws)
    alpha, weight = torch.rand(2, 40, 1, generator=draws)
    states, _ = merge(k, k, alpha, weight, 12)
    for i in range(40):
        own = k[max(0, i - 11) : i + 1]
        assert (states[i] >= own.amin(0) - 1e-6).all()
        assert (states[i] <= own.amax(0) + 1e-6).all()


def test_without_merges_tokens_stay_as_they_are() -> None:
    k = torch.randn(20, 2, 3, 4)
    nothing = torch.zeros(20, 2, 3)
    states, _ = merge(k, k, nothing, nothing + 0.3, 12)
    torch.testing.assert_close(states, k)


def test_gradients_are_those_of_finite_differences() -> None:
    draws = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 7, 2, 3, generator=draws, dtype=torch.float64).requires_grad_().unbind()
    alpha, weight = (torch.rand(2, 7, 2, generator=draws, dtype=torch.float64) + 0.1).unbind()
    inputs = [x.detach().requires_grad_() for x in (k, v, alpha, weight)]
    assert torch.autograd.gradcheck(lambda *x: merge(*x, 4), inputs)
