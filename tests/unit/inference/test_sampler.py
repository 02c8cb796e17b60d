"""Tokens are drawn as often as the softmax of the logits over the temperature says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.inference.sampler import sample

LOGITS = torch.tensor([2.0, -1.0, 1.0, 0.0, 1.5])
DRAWS = 20_000


def shares(params: SamplingParams) -> Tensor:
    """How often each token is drawn."""
    generators = [torch.Generator().manual_seed(0)] * DRAWS
    drawn = sample(LOGITS.expand(DRAWS, -1), [params] * DRAWS, generators)
    return torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_over_the_temperature(temperature: float) -> None:
    weights = [math.exp(x / temperature) for x in LOGITS.tolist()]
    exact = torch.tensor(weights) / sum(weights)
    error = 4 * (exact * (1 - exact) / DRAWS).sqrt()  # four standard errors; the seed is fixed
    assert ((shares(SamplingParams(temperature=temperature)) - exact).abs() < error).all()


def test_at_temperature_zero_the_largest_logit_wins() -> None:
    assert shares(SamplingParams(temperature=0.0)).tolist() == [1, 0, 0, 0, 0]
