"""D2O: budgets of the layers, thresholds and merges, against loops over the rule."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.policy_hooks import merged
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies import d2o
from dms_train.inference.policies.base import RequestSizes, Sequences, Slots
from dms_train.inference.policies.budget import BudgetOptions
from dms_train.inference.policies.d2o import attention_variance, layer_shares
from dms_train.inference.policies.registry import build_policy
from tests.unit.inference.policies.rules import GROUP, HEADS, LENGTH, SIZE, Rule, attend, text

LAYERS = 4


def test_budgets_of_the_layers():
    """F = 0, .5, 1, 2, S = 100, rho = .2: 37.92, 23.00, 13.95 and 5.13 tokens, 80 in all."""
    shares = layer_shares(torch.tensor([0, 0.5, 1, 2]).double(), allocation="softmax", decay=1.0)
    assert (20 * shares).tolist() == pytest.approx([37.92, 23.00, 13.95, 5.13], abs=6e-3)
    one = [torch.tensor([x]) for x in (100, 101, 100, 200, 0)]
    exact = BudgetOptions(cr=5.0, budget_mode="input").exact(Sequences(4, *one, {}))
    assert (exact * shares).sum().item() == pytest.approx(80)
    assert BudgetOptions.whole_tokens(exact * shares).tolist() == [37, 22, 13, 5]
    equal = torch.full((3,), 0.7)
    for allocation in ("softmax", "reciprocal", "uniform"):
        found = layer_shares(equal, allocation=allocation, decay=1.0)
        torch.testing.assert_close(found, torch.ones(3))
    inverse = layer_shares(torch.tensor([1.0, 3]), allocation="reciprocal", decay=1.0)
    torch.testing.assert_close(inverse, torch.tensor([1.5, 0.5]))


@pytest.mark.parametrize(
    ("similar", "compat", "expected"),
    [([0.8], False, 2.900), ([0.8], True, 2.6), ([0.9, 0.5], False, None)],
)
def test_weights_of_a_merge(similar, compat, expected):
    """k_j = 2 and k_i = 4 with u = .8: .5498 and .4502; with u = .9 and .5: .3982, .3603, .2415."""
    u = torch.tensor([1.0, *similar], dtype=torch.float64)
    key = torch.stack([u, (1 - u * u).sqrt()], -1)[None, None]
    value = torch.eye(3, dtype=torch.float64)[: len(u)][None, None]
    if expected is not None:
        value = torch.tensor([[2.0], [4.0]], dtype=torch.float64)[None, None]
    options = {"budget": 1, "reference_compat": compat, "beta": 0.0}
    slots = slots_of(key, value, threshold=0.1)
    evicted = torch.tensor([[[False] + [True] * len(similar)]])
    found = build_policy("d2o", options, None).merge(slots, evicted)
    result = merged(slots, found)[0].value[0, 0, 0]
    if expected is not None:
        assert result.item() == pytest.approx(expected, abs=1e-3)
    else:
        assert result.tolist() == pytest.approx([0.3982, 0.3603, 0.2415], abs=1e-4)


def slots_of(key, value, threshold=None):
    n = key.shape[2]
    one = [torch.tensor([x]) for x in (n, n, n, 99, 0)]
    lists = {}
    if threshold is not None:
        lists["merge threshold"] = torch.tensor([[[threshold, 1.0]]])
    state = torch.zeros(1, 1, n, 1)
    return Slots(0, torch.arange(n)[None, None], state, key, value, Sequences(1, *one, lists))


def test_the_threshold_moves():
    """tau = .6 before and .8 now: .74; the first one is the mean itself."""
    u = torch.tensor([1.0, 0.8], dtype=torch.float64)
    key = torch.stack([u, (1 - u * u).sqrt()], -1)[None, None]
    for before, after in ((0.6, 0.74), (None, 0.8)):
        slots = slots_of(key, key, threshold=before)
        policy = build_policy("d2o", {"budget": 1}, None)
        policy.merge(slots, torch.tensor([[[False, True]]]))
        tau = slots.sequences.lists["merge threshold"][0, 0, 0].item()
        assert tau == pytest.approx(after, abs=1e-6)


class D2O(Rule):
    """One layer with given sizes, per KV head, in float64."""

    def __init__(self, data, row, request, **options):
        super().__init__(data, row, request, **options)
        self.threshold = [None] * HEADS

    def seen(self, t, head, places, weights):
        score = self.score[head // GROUP]
        for place, weight in zip(places, weights.tolist(), strict=True):
            score[place] = score.get(place, 0.0) + weight / GROUP

    def evict(self, t):
        compat, (budget, recent) = self.options["compat"], self.options["sizes"]
        if budget is None or t + 1 < self.request.prompt + compat:
            return
        kept = set(range(t + 1 - recent, t + 1)) | set(range(4))
        before = [set(held) for held in self.held]
        found = []
        for g in range(HEADS):
            self.cut(g, self.score[g], kept, budget)
            pairs = []
            for i in sorted(before[g] - self.held[g]):
                cosine = {j: self.cosine(g, i, j) for j in self.held[g]}
                j = max(cosine, key=cosine.get)
                pairs.append((i, j, cosine[j]))
            found.append(pairs)
        if found[0]:
            self.fold(found, compat)

    def cosine(self, g, i, j):
        a, b = self.key[g, i], self.key[g, j]
        return float(a @ b / a.norm() / b.norm())

    def fold(self, found, compat):
        means = [statistics.fmean(u for *_, u in pairs) for pairs in found]
        by_rank = [
            statistics.fmean(us) for us in zip(*[[u for *_, u in p] for p in found], strict=True)
        ]
        key, value = self.key.clone(), self.value.clone()
        for g, pairs in enumerate(found):
            mean = statistics.fmean(means) if compat else means[g]
            beta, old = (0.5 if compat else 0.7), self.threshold[g]
            self.threshold[g] = mean if old is None else beta * mean + (1 - beta) * old
            taken = {}
            for (i, j, u), rank in zip(pairs, by_rank, strict=True):
                if (rank if compat else u) >= self.threshold[g] - 1e-12:
                    taken.setdefault(j, []).append((i, u))
            for j, sources in taken.items():
                own = 1.0 if compat else math.e
                weights = [u if compat else math.exp(u) for _, u in sources]
                total = own + (len(sources) if compat else sum(weights))
                for x, new in ((self.key, key), (self.value, value)):
                    parts = sum(w * x[g, i] for w, (i, _) in zip(weights, sources, strict=True))
                    new[g, j] = (own * x[g, j] + parts) / total
        self.key, self.value = key, value


def variances(data, row, prompt, compat):
    """F of a layer by loops: over T squared, or brought between 0 and 1 within the heads."""
    query, key = data[0][row], data[1][row]
    sums = torch.zeros(HEADS, prompt, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        for t in range(prompt):
            scores = key[head // GROUP, : t + 1] @ query[head, t] / math.sqrt(SIZE)
            sums[head // GROUP, : t + 1] += scores.softmax(0) / GROUP
    if not compat:
        return statistics.variance((sums.mean(0) / prompt).tolist())
    each = [statistics.variance(line.tolist()) for line in sums]
    return statistics.fmean((x - min(each)) / (max(each) - min(each) + 1e-6) for x in each)


@pytest.mark.parametrize("chunk", [40, 7])
@pytest.mark.parametrize("compat", [False, True])
def test_the_rule_is_kept_in_all_layers(compat, chunk, monkeypatch):
    monkeypatch.setattr(d2o, "_ROWS", 5)
    data = [text(2, seed=layer) for layer in range(LAYERS)]
    requests = [RequestSizes(24, LENGTH, 0), RequestSizes(31, LENGTH, 1)]
    policy = build_policy("d2o", {"cr": 2.0, "reference_compat": compat}, None)
    pool = PagePool(
        head_size=SIZE, state_width=1, dtype=torch.float64, device=torch.device("cpu"), page_slots=4
    )
    cache = CompactCache(pool, policy, layers=LAYERS, rows=2, heads=HEADS)
    outputs, held = through(cache, data, requests, chunk)
    for row, request in enumerate(requests):
        spread = [variances(part, row, request.prompt, compat) for part in data]
        total = sum(math.exp(-f) for f in spread)
        for layer in range(LAYERS):
            share = math.exp(-spread[layer]) / total * LAYERS / 2
            sizes = budget_of(share, request.prompt, layer, compat)
            rule = D2O(data[layer], row, request, compat=compat, sizes=sizes)
            expected, _, after = rule.go()
            torch.testing.assert_close(outputs[layer][row], expected, atol=1e-5, rtol=1e-5)
            for tokens, layers in held[row]:
                if tokens >= request.prompt:
                    assert layers[layer] == after[tokens - 1]


def budget_of(share, prompt, layer, compat):
    """Tokens of a layer, and how many of them are recent."""
    if not compat:
        budget = max(1, int(share * prompt))
        return budget, budget // 4
    if layer in (0, 1, LAYERS - 1):
        return None, None
    half = int((prompt + 1) * min(1.0, max(0.01, share)) * 0.5)
    return 2 * half, half


def through(cache, data, requests, chunk):
    """Outputs by layer and row, and what is held after each pass, one row and pass at a time."""
    outputs = [[[] for _ in requests] for _ in data]
    held = [[] for _ in requests]
    for row, request in enumerate(requests):
        cache.assign(row, request)
        done = [0] * len(requests)
        while done[row] < LENGTH:
            most = cache.policy.max_tokens(request, done[row])
            count = min(most, chunk, LENGTH - done[row])
            for layer, part in enumerate(data):
                result = attend(cache, part, done, {row: count}, layer)
                outputs[layer][row].append(result.output[0])
            done[row] += count
            layers = [[set(head.tolist()) for head in heads] for heads in cache.positions(row)]
            held[row].append((done[row], layers))
    return [[torch.cat(parts, 1) for parts in rows] for rows in outputs], held


def test_variances_of_heads_that_hold_different_tokens():
    position = torch.tensor([[[0, 3, -1], [3, 1, 0]]])
    received = torch.tensor([[[1.0, 2, 9], [4, 3, 0.5]]])
    by_token = [(1 + 0.5) / 2, 3 / 2, (2 + 4) / 2]
    found = attention_variance(received, position, "raw")
    assert found.item() == pytest.approx(statistics.variance(by_token))
    found = attention_variance(received, position, "by_len")
    assert found.item() == pytest.approx(statistics.variance(by_token) / 9)
    assert attention_variance(torch.ones(1, 1, 1), torch.zeros(1, 1, 1).long(), "raw").item() == 0
