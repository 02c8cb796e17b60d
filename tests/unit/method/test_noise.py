"""The relaxation noise is logistic, keyed by what it belongs to, and the same in every layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dms_train.method.noise import logistic_noise, sample_keys

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
SIGMA = math.pi / math.sqrt(3)


def keys(seed: int = 1, step: int = 2, first: int = 0, count: int = 8) -> Tensor:
    return sample_keys(seed, step, torch.arange(first, first + count))


def draws(seed: int = 1, step: int = 2, layer: int = 1) -> Tensor:
    """2**18 draws as float64."""
    return logistic_noise(keys(seed, step), layer, 4096, 8, 0).double()


def mix(x: int) -> int:
    """SplitMix64's finaliser on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def one_draw(seed: int, step: int, sample: int, layer: int, head: int, position: int) -> float:
    key = mix((seed * GOLDEN + 1) & MASK)
    for value in (step, sample, layer, head + 1, position + 1):
        key = mix((key + value * GOLDEN) & MASK)
    u = ((key >> 41) + 0.5) / 2**23
    return math.log(u) - math.log1p(-u)


@pytest.mark.parametrize("seed", [0, 1234, -7, 2**63 - 1, -(2**63), 2**64 + 5])
def test_every_draw_follows_the_integer_recipe(seed: int) -> None:
    step, layer, first_head = 2**40, 61, 3
    samples = torch.tensor([0, 5, 2**50])
    noise = logistic_noise(sample_keys(seed, step, samples), layer, 3, 2, first_head)
    for t, (b, sample), h in itertools.product(range(3), enumerate(samples.tolist()), range(2)):
        expected = one_draw(seed, step, sample, layer, first_head + h, t)
        assert noise[t, b, h].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_any_slice_of_heads_samples_and_positions_is_drawn_alone() -> None:
    whole = logistic_noise(keys(count=6), 3, 40, 8, 0)
    assert whole.dtype == torch.float32
    for first, heads in ((0, 4), (4, 4), (6, 2), (7, 1)):
        part = logistic_noise(keys(count=6), 3, 40, heads, first)
        assert torch.equal(part, whole[:, :, first : first + heads])
    assert torch.equal(logistic_noise(keys(first=2, count=3), 3, 40, 8, 0), whole[:, 2:5])
    assert torch.equal(logistic_noise(keys(count=6), 3, 17, 8, 0), whole[:17])


def test_mean_and_variance_are_those_of_a_logistic_variable() -> None:
    noise = draws()
    count = noise.numel()
    assert abs(noise.mean().item()) < 4 * SIGMA / math.sqrt(count)
    # the fourth moment of a logistic variable is 4.2 squared variances
    assert noise.var().item() == pytest.approx(SIGMA**2, abs=4 * SIGMA**2 * math.sqrt(3.2 / count))


def test_distribution_function_is_the_sigmoid() -> None:
    ordered = draws().flatten().sort().values
    count = len(ordered)
    ranks = torch.arange(count, dtype=torch.float64) / count
    above = (torch.sigmoid(ordered) - ranks).abs().max()
    below = (torch.sigmoid(ordered) - ranks - 1 / count).abs().max()
    assert max(above, below).item() * math.sqrt(count) < 1.95  # Kolmogorov-Smirnov, 0.1 percent


def test_draws_are_finite_and_span_both_tails() -> None:
    noise = draws()
    assert noise.isfinite().all()
    assert 10 < noise.max() < 17
    assert -17 < noise.min() < -10


@pytest.mark.parametrize("x", [-5.0, -2.0, 0.0, 1.5])
def test_noisy_logit_is_positive_with_the_probability_of_its_sigmoid(x: float) -> None:
    noise = draws(seed=3)
    p = 1 / (1 + math.exp(-x))
    error = math.sqrt(p * (1 - p) / noise.numel())
    assert (noise + x > 0).double().mean().item() == pytest.approx(p, abs=4 * error)


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"seed": -1}, {"step": 3}, {"layer": 2}, {"step": 1, "layer": 2}]
)
def test_other_seeds_steps_and_layers_are_uncorrelated(other: dict[str, int]) -> None:
    a, b = draws(), draws(**other)
    assert abs(correlation(a, b)) < 4 / math.sqrt(a.numel())


def test_neighbouring_positions_samples_and_heads_are_uncorrelated() -> None:
    noise = draws()
    pairs = [
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[:, :, 1:], noise[:, :, :-1]),
    ]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 4 / math.sqrt(a.numel())


def test_seed_step_and_sample_are_not_interchangeable() -> None:
    grid = torch.cat([keys(seed, step, 0, 40) for seed in range(-5, 20) for step in range(30)])
    assert len(grid.unique()) == len(grid)
