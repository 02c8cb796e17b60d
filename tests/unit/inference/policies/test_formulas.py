"""Formulas of the policies against worked examples, and options that are refused."""

from __future__ import annotations

import pytest
import torch

from dms_train.hf.rope import Rope
from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.blocks import rotary_frequencies, rotary_tables
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies import r_kv, registry
from dms_train.inference.policies.attention_scores import smoothed, window_attention
from dms_train.inference.policies.base import (
    CachePolicy,
    NewTokens,
    NoOptions,
    PolicyKind,
    RequestSizes,
    Sequences,
    Slots,
)
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.pyramidkv import layer_budget
from dms_train.inference.policies.quest import QuestOptions, QuestPolicy
from dms_train.inference.policies.r_kv import combined, redundancy
from dms_train.inference.policies.registry import build_policy, parse_options, policy_names
from dms_train.inference.policies.rotation import moved_by
from dms_train.method.spec import PRESETS
from tests.support.query_statistics import tiny_statistics
from tests.unit.inference.conftest import tiny_architecture


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
    assert QuestPolicy(QuestOptions(cr=cr)).page == page


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


def test_scores_of_r_kv():
    """I = .5 .3 .2 and R = .2 .5 .3 with weight .07: the order is 0, 2, 1."""
    importance, repeated = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    score = combined(importance, repeated, 0.07)
    torch.testing.assert_close(score, torch.tensor([-0.151, -0.444, -0.265]))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1024, 3, 0])
def test_the_newest_of_similar_keys_repeats_nothing(fixed, rows, monkeypatch):
    """Cosines .8 of tokens 0 and 1 with 2, and .48 of token 3 with 2; 0 and 1 are one key."""
    monkeypatch.setattr(r_kv, "_COSINES", 4 * rows)
    key = torch.tensor([[0.6, 0.8, 0], [0.6, 0.8, 0], [0, 1, 0], [0, 0.48, 0.8773]])
    cosine = key @ key.T
    cosine.fill_diagonal_(0)
    for row, dropped in enumerate([2, 2, 1]):  # the newest that is similar
        cosine[row, dropped] = 0
    if not fixed:
        cosine[3, 0] = 0  # which the code takes where there is none
    order = torch.tensor([2, 0, 3, 1])
    slots = Slots(0, order[None, None], torch.zeros(1, 1, 4, 0), key[order][None, None])
    found = redundancy(slots, threshold=0.5, fix_empty_rows=fixed)[0, 0]
    torch.testing.assert_close(found, cosine.mean(0).softmax(0)[order])


def test_positions_in_the_cache():
    """T = 10, B = 6, s = 2: 0, 1, 6, 7, 8, 9 are read as 0 to 5, distances being what counts."""
    policy = build_policy("streaming_llm", {"budget": 6, "sinks": 2, "positions": "cache"}, None)
    slots = Slots(0, torch.arange(10)[None, None], torch.zeros(1, 1, 10, 0))
    slots = slots._replace(sequences=sequences(end=10))
    at = torch.tensor([[9, 4]])
    held = ~policy.evict_mask(slots, at)[0, 0]
    assert held[0].nonzero().flatten().tolist() == [0, 1, 6, 7, 8, 9]
    moved = policy.position_shift(slots, at)
    read = torch.arange(10) + moved.by[0, 0] * moved.slots[0, 0]
    assert (read[held[0]] - 4).tolist() == [0, 1, 2, 3, 4, 5]
    assert moved.by[0].tolist() == [4, 0]


def test_entries_of_the_memory_pool():
    """Keys 1, 3, 5, 2 without rotation in pairs: entries 2 and 3.5 at positions 1 and 3."""
    policy = build_policy("memory_pooling", {"cr": 2}, None)
    pool = PagePool(
        head_size=2, state_width=0, dtype=torch.float64, device=torch.device("cpu"), slab_pages=4
    )
    cache = CompactCache(pool, policy, layers=1, rows=1, heads=1, frequency=torch.zeros(1, 1))
    cache.assign(0, RequestSizes(1, 4, 0))
    for t, value in enumerate([1.0, 3, 5, 2]):
        key = torch.full((1, 1, 1, 2), value, dtype=torch.float64)
        arrival = NewTokens(torch.tensor([[t]]), key, key, None)
        done = cache.attend(0, torch.tensor([0]), torch.zeros_like(key), arrival)
    assert cache.positions(0)[0][0].tolist() == [1, 3]
    assert done.reads.tolist() == [[2]]
    torch.testing.assert_close(done.output.flatten()[0].item(), (2 + 3.5) / 2)


def test_vectors_move_as_rope_turns_them():
    a = tiny_architecture("llama")
    query = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rope = Rope(a.rotary_base)
    for distance in (0, 5, -3):
        cos, sin = rotary_tables(a, torch.tensor([7, 7 + distance]), torch.float32, rope)
        turn = [
            query * c[0, 0] + torch.cat([-query[:, 4:], query[:, :4]], -1) * s[0, 0]
            for c, s in zip(cos, sin, strict=True)
        ]
        by = torch.tensor(distance)
        found = moved_by(turn[0], by, rotary_frequencies(a, rope, torch.device("cpu")))
        torch.testing.assert_close(found, turn[1], atol=1e-5, rtol=1e-5)


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
        ("h2o", {"budget": 2**63}, "expected a whole number of up to 63 bits"),
        ("h2o", {"budget": "many"}, "budget='many': expected a whole number"),
        ("h2o", {"budget": True}, "budget=True: expected a whole number"),
        ("h2o", {"budget": 4, "group_reduce": "median"}, "choose one of mean, max, sum"),
        ("snapkv", {"budget": 4, "kernel": 4}, "odd number"),
        ("r_kv", {"budget": 4, "kernel": 4}, "odd number"),
        ("r_kv", {"budget": 4, "importance": 1.5}, "from 0 to 1"),
        ("roco", {"budget": 4, "varied": -1}, "use at least 0"),
        ("d2o", {"budget": 4, "variance_norm": "heads"}, "choose one of null, raw, by_len"),
        ("d2o", {"budget": 4, "recent": 2.0}, "from 0 to 1"),
        ("hard_kv", {"budget": 4, "p": 0.0}, "above 0"),
        ("hard_kv", {"budget": 4, "kernel": 2}, "odd number"),
        ("hard_kv", {"budget": 4, "base": "h2o"}, "choose one of vanilla, snapkv, r_kv"),
        ("memory_pooling", {}, "needs cr"),
        ("memory_pooling", {"cr": 2.5}, "whole number"),
        ("memory_pooling", {"budget": 4}, "no option budget"),
        ("streaming_llm", {"budget": 4, "positions": "new"}, "choose one of original, cache"),
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


def test_a_channel_that_is_cleared_after_rope_has_no_positions_in_the_cache():
    options = {"budget": 4, "positions": "cache"}
    with pytest.raises(InferenceError, match="positions=original"):
        build_policy("streaming_llm", options, PRESETS["dms_nvidia"])


def test_options_as_words():
    words = ["sinks=2", "pool=max", "protect_last=true", "cr=2.5"]
    assert parse_options(words) == {"sinks": 2, "pool": "max", "protect_last": True, "cr": 2.5}
    with pytest.raises(InferenceError, match="KEY=VALUE"):
        parse_options(["sinks"])


def test_a_policy_of_another_distribution(monkeypatch):
    class Last(CachePolicy):
        """Reads one token."""

        def evict_mask(self, slots, at):
            return slots.position[:, :, None] < at[:, None, :, None]

    monkeypatch.setattr(registry, "_registered", {})
    registry.register_policy("last", PolicyKind(NoOptions, lambda options, spec: Last()))
    assert "last" in policy_names()
    assert isinstance(build_policy("last", {}, None), Last)
    assert EngineOptions(policy="last").policy == "last"


def test_every_policy_takes_prompts_in_parts_of_at_least_one_token():
    request = RequestSizes(10, 30, 0)
    trained = {"dmc", "dms", "kvzap", "trim_kv"}
    for name in set(policy_names()) - trained - {"auto", "keep_all", "window"}:
        own = {"cr": 2} if name == "memory_pooling" else {"budget": 4}
        if name == "triattention":
            own["statistics"] = tiny_statistics()
        policy = build_policy(name, own, None)
        for computed in range(30):
            most = policy.max_tokens(request, computed)
            assert most is None or most >= 1
