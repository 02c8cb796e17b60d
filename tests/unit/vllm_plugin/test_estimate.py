"""Estimate of the blocks of prompts, against sums over all prompts."""

from __future__ import annotations

import math
import random

import pytest

from dms_train.vllm_plugin.estimate import FADE, BlockEstimate

WINDOW, RATIO, BLOCK = 33, 4.0, 16


def expected_share(prompts: list[tuple[int, float]]) -> float:
    """Weighted mean and standard deviation by their definitions."""
    outside = [(n - WINDOW, s - WINDOW) for n, s in prompts if n > WINDOW]
    shares = [1 / RATIO, *(min(max(s / n, 0), 1) for n, s in outside)]
    age = range(len(shares) - 1, -1, -1)
    tokens = [WINDOW, *(n for n, _ in outside)]
    weights = [n * FADE**a for n, a in zip(tokens, age, strict=True)]
    mean = math.fsum(w * x for w, x in zip(weights, shares, strict=True)) / math.fsum(weights)
    spread = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, shares, strict=True))
    return min(1.0, mean + math.sqrt(spread / math.fsum(weights)))


@pytest.mark.parametrize("seed", range(4))
def test_the_share_is_the_weighted_mean_plus_a_standard_deviation(seed):
    draw = random.Random(seed)
    estimate, prompts = BlockEstimate(WINDOW, RATIO, BLOCK), []
    for _ in range(200):
        tokens = draw.randrange(1, 3000)
        prompts.append((tokens, tokens * draw.uniform(0.05, 1.0)))
        estimate.observe(*prompts[-1])
        assert estimate.share == pytest.approx(expected_share(prompts), rel=1e-9)


def test_before_any_prompt_the_ratio_of_the_export_holds():
    estimate = BlockEstimate(WINDOW, RATIO, BLOCK)
    assert [estimate.blocks(n) for n in (1, 16, 17, 33, 33 + 4 * 15, 34 + 4 * 15)] == [
        *(1, 1, 2, 3),
        *(3, 4),  # 48 and 49 tokens
    ]


def test_an_estimate_is_never_more_than_all_tokens():
    estimate = BlockEstimate(WINDOW, RATIO, BLOCK)
    for tokens in (40, 4000):
        estimate.observe(tokens, tokens + 100.0)  # pages are filled in part
    assert all(estimate.blocks(n) <= math.ceil(n / BLOCK) for n in range(1, 500))


def test_most_prompts_fit_their_estimate():
    draw = random.Random(0)
    estimate = BlockEstimate(WINDOW, RATIO, BLOCK)

    def prompt() -> tuple[int, float]:
        tokens = draw.randrange(500, 3000)
        return tokens, WINDOW + (tokens - WINDOW) * draw.gauss(0.3, 0.05)

    for _ in range(100):
        estimate.observe(*prompt())
    later = [prompt() for _ in range(1000)]
    fitting = sum(slots <= estimate.blocks(tokens) * BLOCK for tokens, slots in later)
    assert 780 < fitting < 920  # 841 of a normal distribution
