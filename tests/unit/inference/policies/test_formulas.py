"""Formulas of the policies against worked examples, and options that are refused."""

from __future__ import annotations

import pytest
import torch

from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies import registry
from dms_train.inference.policies.base import (
    CachePolicy,
    NoOptions,
    PolicyKind,
    RequestSizes,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.pyramidkv import layer_budget
from dms_train.inference.policies.quest import QuestOptions, QuestPolicy
from dms_train.inference.policies.registry import build_policy, parse_options, policy_names
from dms_train.inference.policies.snapkv import smoothed, window_attention


def test_ratios_are_divided_as_written():
    """33 / 1.1 is 29.99... in float64, 18 / 1.2 is 14.99... in float32."""
    for limit, cr, tokens in ((33, 1.1, 30), (18, 1.2, 15), (36, 2.4, 15), (87, 2.9, 30)):
        budget = BudgetOptions(cr=cr)
        assert budget.tokens(sequences(end=5, limit=limit)).tolist() == [tokens]
        assert budget.first_tokens(RequestSizes(4, limit, 0)) == tokens


def sequences(*, end, prompt=0, limit=0) -> Sequences:
    one = [torch.tensor([x]) for x in (end - 1, end, prompt, limit, 0)]
    return Sequences(1, *one, {})


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"budget": 7}, 7),
        ({"cr": 8.0}, 1024),
        ({"cr": 8.0, "budget_mode": "input"}, 125),
        ({"cr": 8.0, "budget_mode": "growing"}, 150),
        ({"cr": 1e6}, 1),
    ],
)
def test_budgets_of_a_request(options, tokens):
    """1,000 prompt tokens and up to 7,192 new ones, 1,200 of them there."""
    budget = BudgetOptions(**options)
    assert budget.tokens(sequences(end=1200, prompt=1000, limit=8192)).tolist() == [tokens]


@pytest.mark.parametrize(("cr", "page"), [(4.0, 16), (16.0, 32), (2.0, 16)])
def test_pages_of_quest_grow_with_the_ratio(cr, page):
    assert QuestPolicy(QuestOptions(cr=cr))._page == page


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("avg", [0, 0.3, 0.3, 0.3, 0, 0.0667, 0.0667, 0.0667]),
        ("max", [0, 0.9, 0.9, 0.9, 0, 0.2, 0.2, 0.2]),
    ],
)
def test_smoothing_of_scores(pool, expected):
    score = torch.tensor([0, 0, 0.9, 0, 0, 0, 0.2, 0])
    order = torch.randperm(8)  # slots hold tokens in any order
    found = smoothed(score[order][None, None], order[None, None], 3, pool)[0, 0]
    back = torch.empty(8).scatter(0, order, found)
    torch.testing.assert_close(back, torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens", [9, 2])
def test_attention_of_the_window(tokens):
    """Mean over the last three queries, or as many as there are, of causal attention."""
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, tokens, 4, generator=draw, dtype=torch.float64)
    causal = torch.ones(tokens, tokens).tril().bool()
    weights = (query @ key.T / 2).masked_fill(~causal, -torch.inf).softmax(-1)
    order = torch.randperm(tokens, generator=draw)
    newest = torch.zeros(3, 4, dtype=torch.float64)
    newest[-tokens:] = query[-3:]
    slots = Slots(0, order[None, None], torch.zeros(1, 1, tokens, 0), key[order][None, None])
    known = sequences(end=tokens)._replace(query=newest.view(1, 1, 3, 1, 4))
    found = window_attention(slots, known)[0, 0, 0]
    torch.testing.assert_close(found, weights[-3:].mean(0)[order])


def test_budgets_of_layers():
    """T = 64, W = 8, C = 24, beta = 4 and four layers: 36, 28, 20, 12."""
    budget, tokens = torch.tensor([24]), torch.tensor([64])
    kept = [
        int(layer_budget(budget, tokens, window=8, beta=4, layer=layer, layers=4))
        for layer in range(4)
    ]
    assert kept == [36, 28, 20, 12]


@pytest.mark.parametrize("tokens", [1, 20, 30, 33, 64, 500])
@pytest.mark.parametrize("budget", [4, 24, 31])
@pytest.mark.parametrize("layers", [1, 3, 7])
def test_budgets_fall_with_depth_and_their_mean_is_the_budget(tokens, budget, layers):
    kept = [
        int(
            layer_budget(
                torch.tensor([budget]),
                torch.tensor([tokens]),
                window=8,
                beta=4,
                layer=layer,
                layers=layers,
            )
        )
        for layer in range(layers)
    ]
    assert kept == sorted(kept, reverse=True)
    if tokens >= 2 * budget and layers > 1:
        assert 0 <= sum(kept) - layers * budget <= layers * (layers - 1) / 2


@pytest.mark.parametrize(
    ("policy", "options", "named"),
    [
        ("h2o", {"budgett": 3}, "did you mean budget"),
        ("h2o", {}, "needs a budget"),
        ("h2o", {"budget": 3, "cr": 2.0}, "one of them"),
        ("h2o", {"budget": 0}, "budget=0: use at least 1"),
        ("h2o", {"budget": 2**63}, "use a number below"),
        ("h2o", {"budget": "many"}, "budget='many': expected a whole number"),
        ("h2o", {"budget": True}, "budget=True: expected a whole number"),
        ("h2o", {"budget": 4, "group_reduce": "median"}, "choose one of mean, max, sum"),
        ("snapkv", {"budget": 4, "kernel": 4}, "odd number"),
        ("keep_all", {"window": 3}, "no option window"),
        ("dms", {}, "not trained for it"),
        ("window", {}, "state one"),
        ("auto", {"window": 3}, "takes no options"),
        ("h3o", {}, "choose one of auto, "),
    ],
)
def test_what_does_not_fit_is_refused(policy, options, named):
    with pytest.raises(InferenceError, match=named):
        build_policy(policy, options, None)


def test_options_as_words():
    words = ["sinks=2", "pool=max", "protect_last=true", "cr=2.5"]
    assert parse_options(words) == {"sinks": 2, "pool": "max", "protect_last": True, "cr": 2.5}
    with pytest.raises(InferenceError, match="KEY=VALUE"):
        parse_options(["sinks"])


def test_a_policy_of_another_distribution(monkeypatch):
    class Last(CachePolicy):
        """Reads one token."""

        def expired(self, slots, at):
            return slots.position[:, :, None] < at[:, None, :, None]

    monkeypatch.setattr(registry, "_registered", {})
    registry.register_policy("last", PolicyKind(NoOptions, lambda options, spec: Last()))
    assert "last" in policy_names()
    assert isinstance(build_policy("last", {}, None), Last)
    assert EngineOptions(policy="last").policy == "last"


def test_every_policy_takes_prompts_in_parts_of_at_least_one_token():
    request = RequestSizes(10, 30, 0)
    for name in set(policy_names()) - {"auto", "dms", "keep_all", "window"}:
        policy = build_policy(name, {"budget": 4}, None)
        for computed in range(30):
            most = policy.max_tokens(request, computed)
            assert most is None or most >= 1
