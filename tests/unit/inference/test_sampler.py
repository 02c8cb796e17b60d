"""Sampling follows the definition of each parameter, independent of the rest of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.inference.sampler import SamplingRow, _restricted, sample, stream_keys
from tests.support import sampling_truth

LOGITS = torch.tensor([2.0, -1.0, 1.0, 0.0, 1.5])
DRAWS = 10_000


def shares(params: SamplingParams, prompt: tuple = (), output: tuple = ()) -> Tensor:
    """Return the share of rows, which differ in their seed, that draw each token."""
    rows = [SamplingRow(params, seed, 0, list(prompt), list(output)) for seed in range(DRAWS)]
    tokens = torch.tensor([s.token for s in sample(LOGITS.expand(DRAWS, -1), rows)])
    return torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS


def softmax(scores: list[float], kept: set[int] | None = None) -> Tensor:
    weights = [math.exp(x) if kept is None or i in kept else 0.0 for i, x in enumerate(scores)]
    return torch.tensor(weights) / sum(weights)


def assert_drawn(found: Tensor, exact: Tensor) -> None:
    error = 4 * (exact * (1 - exact) / DRAWS).sqrt()  # four standard errors; the seeds are fixed
    assert ((found - exact).abs() <= error).all(), (found, exact)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_over_the_temperature(temperature: float) -> None:
    exact = softmax([x / temperature for x in LOGITS.tolist()])
    assert_drawn(shares(SamplingParams(temperature=temperature)), exact)


def test_at_temperature_zero_the_largest_logit_wins() -> None:
    assert shares(SamplingParams(temperature=0.0)).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), {0}),
        (SamplingParams(top_k=3), {0, 4, 2}),
        # shares are 0.464, 0.282, 0.171, 0.063 and 0.023 of tokens 0, 4, 2, 3 and 1
        (SamplingParams(top_p=0.4), {0}),
        (SamplingParams(top_p=0.5), {0, 4}),
        (SamplingParams(top_p=0.8), {0, 4, 2}),
        (SamplingParams(min_p=0.3), {0, 4, 2}),
        (SamplingParams(min_p=0.5), {0, 4}),
        # of the two that top-k leaves, the first has a share of 0.622
        (SamplingParams(top_k=2, top_p=0.6), {0}),
        (SamplingParams(top_k=2, top_p=0.63), {0, 4}),
    ],
    ids=str,
)
def test_what_is_excluded_is_never_drawn_and_the_rest_keeps_its_odds(params, kept) -> None:
    assert_drawn(shares(params), softmax(LOGITS.tolist(), kept))


def test_the_temperature_acts_before_top_p() -> None:
    # at temperature 4 the shares are 0.28, 0.25, 0.22, 0.17 and 0.13: three reach 0.7
    exact = softmax([x / 4 for x in LOGITS.tolist()], {0, 4, 2})
    assert_drawn(shares(SamplingParams(temperature=4.0, top_p=0.7)), exact)


@pytest.mark.parametrize("step", [0.0, 1.0, 1e-3], ids=["equal", "few values", "any values"])
def test_tokens_are_drawn_from_what_loops_leave(step: float) -> None:
    """The first of equal scores are kept, also if a share is reached exactly."""
    torch.manual_seed(1)
    logits = (torch.randn(600) / max(step, 1e-9)).round() * step
    shares = (1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99999)
    params = [SamplingParams(top_p=share, temperature=t) for share in shares for t in (0.7, 1.0)]
    params += [SamplingParams(top_k=k, top_p=0.5) for k in (1, 2, 64, 200, 10_000)]
    params += [SamplingParams(top_k=5), SamplingParams(min_p=0.1), SamplingParams(min_p=1.0)]
    rows = [SamplingRow(p, seed, 0, [], []) for seed in range(5) for p in params]
    found = [s.token for s in sample(logits.expand(len(rows), -1), rows)]
    keys = stream_keys(*torch.tensor([row.stream for row in rows]).T)
    expected = [
        sampling_truth.drawn(logits, row.params, key) for row, key in zip(rows, keys, strict=True)
    ]
    assert found == expected


def test_without_top_p_the_least_likely_tokens_are_left() -> None:
    """Their weights, as integers, are 0."""
    scores = torch.tensor([[0.0, -90.0, -100.0]], dtype=torch.float64)
    left = _restricted(scores, [SamplingParams(top_k=2)]).isfinite()
    assert left.tolist() == [[True, True, False]]


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_an_infinite_logit_is_always_drawn(how: dict) -> None:
    logits = torch.tensor([[0.0, 1.0, torch.inf, 2.0]])
    for seed in range(20):
        row = SamplingRow(SamplingParams(**how), seed, 0, [], [])
        assert [s.token for s in sample(logits, [row])] == [2]


def test_bias_and_penalties_change_the_logits_as_defined() -> None:
    params = SamplingParams(
        logit_bias={1: 2.5, 3: -1.0},
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
    )
    prompt, output = (0, 1), (2, 2, 4)
    scores = LOGITS.tolist()
    scores[1] += 2.5
    scores[3] -= 1.0
    for token in {*prompt, *output}:
        scores[token] = scores[token] / 1.5 if scores[token] > 0 else scores[token] * 1.5
    for token in set(output):
        scores[token] -= 0.5 + 0.25 * output.count(token)
    assert_drawn(shares(params, prompt, output), softmax(scores))


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, generator=draw)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(min_p=0.05, temperature=0.7),
        SamplingParams(repetition_penalty=1.2, logprobs=3),
    ]
    rows = [
        SamplingRow(kinds[i % 5], seed=i // 7, index=i % 3, prompt=[i], output=[1] * (i % 11))
        for i in range(64)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [s.token for s in together] == [s.token for s in alone]
    order = torch.randperm(64, generator=draw).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert [s.token for s in shuffled] == [together[i].token for i in order]


@pytest.mark.parametrize("change", [{"seed": 2}, {"index": 1}, {"output": [7]}])
def test_seed_continuation_and_place_each_give_other_numbers(change) -> None:
    params = SamplingParams()
    logits = torch.zeros(1, 1000)
    base = {"seed": 1, "index": 0, "prompt": [1], "output": [5, 6]}
    drawn = [
        [
            sample(logits, [SamplingRow(params, **{**fields, "seed": fields["seed"] + 10 * i})])[
                0
            ].token
            for i in range(8)
        ]
        for fields in (base, base, {**base, **change})
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.3, logit_bias={1: 100.0}, logprobs=2)
    (sampled,) = sample(LOGITS[None], [SamplingRow(params, 0, 0, [], [])])
    exact = softmax(LOGITS.tolist()).log()
    assert sampled.token == 1
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(exact[1].item(), abs=1e-6)
    assert list(sampled.logprobs.top) == [0, 4]
    assert list(sampled.logprobs.top.values()) == pytest.approx(exact[[0, 4]].tolist(), abs=1e-6)


def test_without_alternatives_the_chosen_tokens_logprob_is_returned() -> None:
    (sampled,) = sample(LOGITS[None], [SamplingRow(SamplingParams(logprobs=0), 0, 0, [], [])])
    assert sampled.logprobs is not None
    assert sampled.logprobs.top == {}
    assert sampled.logprobs.logprob < 0
