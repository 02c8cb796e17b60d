"""What each policy keeps, against loops over its published rule, in both caches."""

from __future__ import annotations

import math

import pytest
import torch

from dms_train.inference.cache.compact import CompactCache, merged
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import Arrival, RequestSizes, Sequences, Slots
from dms_train.inference.policies.registry import build_policy

HEADS, GROUP, SIZE, LENGTH = 2, 2, 6, 40
SCALE = 1 / math.sqrt(SIZE)


def compact(policy, rows):
    pool = PagePool(
        head_size=SIZE,
        state_width=policy.state_width,
        dtype=torch.float64,
        device=torch.device("cpu"),
        page_slots=4,
        slab_pages=4,
    )
    return CompactCache(pool, policy, layers=1, rows=rows, heads=HEADS)


def dense(policy, rows):
    like = torch.zeros(0, SIZE, dtype=torch.float64)
    return DenseCache(policy, layers=1, rows=rows, heads=HEADS, like=like)


def text(rows, length=LENGTH, seed=0):
    """Queries [rows, HEADS * GROUP, length, SIZE], keys and values [rows, HEADS, length, SIZE]."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, HEADS * GROUP, length, SIZE, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, rows, HEADS, length, SIZE, generator=draw, dtype=torch.float64)
    return 2 * query, key, value


def run(cache, data, requests, *, chunk):
    """Outputs, reads and kept positions of every row, one pass after another, as engines plan them.

    Rows take part with as many tokens as the policy allows; those with one token have a pass of
    their own, others are padded.
    """
    rows, length = len(requests), data[0].shape[2]
    for row, request in enumerate(requests):
        cache.assign(row, request)
    done = [0] * rows
    outputs, reads, kept = ([[] for _ in requests] for _ in range(3))
    while any(n < length for n in done):
        counts = {}
        for row in (row for row in range(rows) if done[row] < length):
            most = cache.policy.max_tokens(requests[row], done[row]) or chunk
            counts[row] = min(most, chunk, length - done[row])
        single = {row: 1 for row, count in counts.items() if count == 1}
        for part in (single, {row: n for row, n in counts.items() if n > 1}):
            result = attend(cache, data, done, part)
            for place, (row, count) in enumerate(part.items()):
                outputs[row].append(result.output[place, :, :count])
                reads[row].append(result.reads[place])
                done[row] += count
                (heads,) = cache.positions(row)
                kept[row].append((done[row], [set(head.tolist()) for head in heads]))
    return [torch.cat(parts, 1) for parts in outputs], [sum(r) for r in reads], kept


def attend(cache, data, done, counts):
    """A pass of these rows, each with so many tokens behind those that are done."""
    if not counts:
        return None
    width = max(counts.values())
    position = torch.full((len(counts), width), -1)
    parts = [torch.zeros(len(counts), x.shape[1], width, SIZE, dtype=x.dtype) for x in data]
    for place, (row, count) in enumerate(counts.items()):
        position[place, :count] = torch.arange(done[row], done[row] + count)
        for part, x in zip(parts, data, strict=True):
            part[place, :, :count] = x[row, :, done[row] : done[row] + count]
    arrival = Arrival(position, parts[1], parts[2], None)
    return cache.attend(0, torch.tensor(list(counts)), parts[0], arrival)


class Rule:
    """One row of a policy, token by token, with Python sets.

    Attributes:
        held: Positions by KV head.
    """

    def __init__(self, data, row, request, **options):
        self.query, self.key, self.value = (x[row] for x in data)
        self.request, self.options = request, options
        self.held = [set() for _ in range(HEADS)]
        self.score = [{} for _ in range(HEADS)]
        self.outputs, self.reads, self.after = [], [0] * HEADS, []

    @property
    def budget(self):
        if "budget" in self.options:
            return self.options["budget"]
        whole = {
            "total": self.request.limit,
            "input": self.request.prompt,
            "growing": max(self.request.prompt, len(self.outputs) + 1),
        }[self.options.get("budget_mode", "total")]
        return max(1, math.floor(whole / self.options["cr"]))

    def weights(self, head, query, places):
        """Attention of a query head over positions, in their order."""
        scores = self.key[head // GROUP, places] @ self.query[head, query] * SCALE
        return scores.softmax(0)

    def visible(self, t, head):
        """Positions that query head `head` reads at step t, the token itself included."""
        return sorted(self.held[head // GROUP])

    def go(self):
        for t in range(LENGTH):
            self.before(t)
            for held in self.held:
                held.add(t)
            output, read = [], [set() for _ in range(HEADS)]
            for head in range(HEADS * GROUP):
                places = self.visible(t, head)
                weights = self.weights(head, t, places)
                output.append(weights @ self.value[head // GROUP, places])
                read[head // GROUP].update(places)
                self.seen(t, head, places, weights)
            self.reads = [n + len(r) for n, r in zip(self.reads, read, strict=True)]
            self.evict(t)
            self.outputs.append(torch.stack(output))
            self.after.append([set(held) for held in self.held])
        return torch.stack(self.outputs, 1), torch.tensor(self.reads), self.after

    def before(self, t):
        pass

    def seen(self, t, head, places, weights):
        pass

    def evict(self, t):
        pass

    def cut(self, g, score, protected, budget):
        """Drop the lowest scores of a KV head, of equal ones the highest position."""
        while len(self.held[g]) > budget:
            free = self.held[g] - protected
            self.held[g].remove(min(free, key=lambda j: (score[j], -j)))


class StreamingLLM(Rule):
    def before(self, t):
        last = max(1, self.budget - self.options.get("sinks", 4))
        first = self.budget - last
        for g, held in enumerate(self.held):
            self.held[g] = {j for j in held if j < first or t - j < last}


class H2O(Rule):
    def seen(self, t, head, places, weights):
        score = self.score[head // GROUP]
        for place, weight in zip(places, weights.tolist(), strict=True):
            score[place] = score.get(place, 0.0) + weight / GROUP

    def evict(self, t):
        if self.options.get("prefill") == "dense" and t + 1 < self.request.prompt:
            return
        recent = set(range(t + 1 - (self.budget - self.budget // 2), t + 1))
        for g in range(HEADS):
            self.cut(g, self.score[g], recent, self.budget)


class CaM(H2O):
    """The expected merge: p times the value, shared by the next kept tokens."""

    def cut(self, g, score, protected, budget):
        before = set(self.held[g])
        super().cut(g, score, protected, budget)
        values = self.value[g].clone()
        for j in before - self.held[g]:
            targets = sorted(k for k in self.held[g] if k > j)[: self.options["targets"]]
            mean = sum(score[k] for k in targets) / len(targets)
            for k in targets:
                values[k] += min(1.0, score[j] / mean) * self.value[g, j] / len(targets)
        self.value = torch.stack([values if n == g else v for n, v in enumerate(self.value)])


class TOVA(Rule):
    def before(self, t):
        self.score = [{} for _ in range(HEADS)]

    def seen(self, t, head, places, weights):
        groups = range(HEADS) if self.options.get("scope") != "group" else [head // GROUP]
        for g in groups:
            for place, weight in zip(places, weights.tolist(), strict=True):
                self.score[g][place] = self.score[g].get(place, 0.0) + weight

    def evict(self, t):
        protected = {t} if self.options.get("protect_last") else set()
        for g in range(HEADS):
            self.cut(g, self.score[g], protected, self.budget)


class SnapKV(Rule):
    def kept(self):
        return self.budget

    def evict(self, t):
        if t + 1 != self.request.prompt:
            return
        window, kernel = self.options["window"], self.options["kernel"]
        first = max(0, t + 1 - window)
        for g in range(HEADS):
            mean = torch.zeros(t + 1, dtype=torch.float64)
            for head in range(g * GROUP, (g + 1) * GROUP):
                for query in range(first, t + 1):
                    mean[: query + 1] += self.weights(head, query, list(range(query + 1)))
            mean = mean[:first] / (GROUP * (t + 1 - first))
            padded = torch.cat([torch.zeros(kernel // 2), mean, torch.zeros(kernel // 2)])
            parts = [padded[j : j + kernel] for j in range(first)]
            pooled = [float(p.max() if self.options["pool"] == "max" else p.mean()) for p in parts]
            last = set(range(t + 1 - min(window, self.kept()), t + 1))
            score = dict(enumerate(pooled)) | dict.fromkeys(range(first, t + 1), 0.0)
            self.cut(g, score, last, self.kept())


class Knorm(Rule):
    def evict(self, t):
        if t + 1 == self.request.prompt:
            for g in range(HEADS):
                score = {j: -float(self.key[g, j].norm()) for j in range(t + 1)}
                self.cut(g, score, set(), self.budget)


class KeyDiff(Rule):
    def evict(self, t):
        if t + 1 == self.request.prompt:
            for g in range(HEADS):
                unit = self.key[g, : t + 1] / self.key[g, : t + 1].norm(dim=1, keepdim=True)
                mean = unit.mean(0)
                score = {j: -float(unit[j] @ mean / mean.norm()) for j in range(t + 1)}
                self.cut(g, score, set(), self.budget)


class Quest(Rule):
    def visible(self, t, head):
        everything = list(range(t + 1))
        page = self.options["page"]
        count = max(1, self.budget // page)
        pages = [everything[first : first + page] for first in range(0, t + 1, page)]
        if t < self.request.prompt:
            return everything
        query, bounds = self.query[head, t], {}
        for number, places in enumerate(pages):
            keys = self.key[head // GROUP, places]
            bounds[number] = float(sum(max(q * k for k in keys[:, c]) for c, q in enumerate(query)))
        if self.options.get("include_last_page", True):
            bounds[len(pages) - 1] = math.inf
        best = sorted(bounds, key=lambda n: (-bounds[n], n))[:count]
        return sorted(place for number in best for place in pages[number])


REQUESTS = [RequestSizes(24, LENGTH, 0), RequestSizes(11, LENGTH + 8, 1), RequestSizes(40, 40, 2)]
SNAP = {"window": 5, "kernel": 3, "pool": "max"}
CASES = [
    ("streaming_llm", {"budget": 9, "sinks": 2}, StreamingLLM),
    ("streaming_llm", {"cr": 3.0}, StreamingLLM),
    ("streaming_llm", {"cr": 2.0, "sinks": 2, "budget_mode": "growing"}, StreamingLLM),
    ("h2o", {"budget": 9}, H2O),
    ("h2o", {"cr": 2.0, "budget_mode": "growing"}, H2O),
    ("tova", {"cr": 2.0, "budget_mode": "input"}, TOVA),
    ("h2o", {"cr": 3.0, "prefill": "dense"}, H2O),
    ("cam", {"budget": 9, "expected": True, "targets": 3}, CaM),
    ("cam", {"cr": 3.0, "prefill": "dense", "expected": True, "targets": 20}, CaM),
    ("tova", {"budget": 7}, TOVA),
    ("tova", {"cr": 4.0, "scope": "group", "protect_last": True}, TOVA),
    ("snapkv", {"budget": 12, **SNAP}, SnapKV),
    ("snapkv", {"cr": 3.0, **SNAP, "pool": "avg", "kernel": 5}, SnapKV),
    ("knorm", {"budget": 8}, Knorm),
    ("keydiff", {"budget": 8}, KeyDiff),
    ("quest", {"budget": 12, "page": 4}, Quest),
    ("quest", {"budget": 8, "page": 4, "include_last_page": False}, Quest),
]


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunk", [40, 7, 23])
@pytest.mark.parametrize(("name", "options", "rule"), CASES, ids=lambda x: str(x)[:40])
def test_the_rule_is_kept_in_mixed_batches(build, chunk, name, options, rule):
    if rule is CaM and build is dense:
        pytest.skip("a masked cache merges nothing")
    data = text(len(REQUESTS))
    policy = build_policy(name, options, None)
    outputs, reads, kept = run(build(policy, len(REQUESTS)), data, REQUESTS, chunk=chunk)
    for row, request in enumerate(REQUESTS):
        expected, read, after = rule(data, row, request, **options).go()
        close = {"atol": 1e-5, "rtol": 1e-5} if rule is CaM else {}  # scores are float32
        torch.testing.assert_close(outputs[row], expected, **close)
        assert torch.equal(reads[row], read)
        for tokens, held in kept[row]:
            if policy.scored:
                assert held == after[tokens - 1]


def attention_of(rows):
    """Queries and keys [1, 1, n, n] for which attention has these rows."""
    n = len(rows)
    weights = torch.full((n, n), 1e-30, dtype=torch.float64)
    for i, row in enumerate(rows):
        weights[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return weights.log()[None, None], torch.eye(n, dtype=torch.float64)[None, None] * n**0.5


ROWS = [[1], [0.6, 0.4], [0.5, 0.1, 0.4], [0.4, 0.1, 0.3, 0.2], [0.3, 0.05, 0.35, 0.1, 0.2]]


@pytest.mark.parametrize(("name", "left"), [("h2o", {1}), ("tova", {1})])
@pytest.mark.parametrize("prefill", ["stream", "dense"])
def test_the_token_that_leaves_a_known_attention_matrix(name, left, prefill):
    """H2O sums 2.8, .65, 1.05, .3, .2 and keeps {3, 4} and {0, 2}; TOVA drops .05 of the last."""
    query, key = attention_of(ROWS)
    policy = build_policy(name, {"budget": 4, "prefill": prefill}, None)
    pool = PagePool(
        head_size=5, state_width=1, dtype=torch.float64, device=torch.device("cpu"), slab_pages=4
    )
    cache = CompactCache(pool, policy, layers=1, rows=1, heads=1)
    request = RequestSizes(5, 9, 0)
    cache.assign(0, request)
    done = 0
    while done < 5:
        count = min(policy.max_tokens(request, done), 5 - done)
        part = slice(done, done + count)
        position = torch.arange(done, done + count)[None]
        arrival = Arrival(position, key[:, :, part], key[:, :, part], None)
        cache.attend(0, torch.tensor([0]), query[:, :, part], arrival)
        done += count
    assert set(range(5)) - set(cache.positions(0)[0][0].tolist()) == left


def test_values_are_merged_with_their_probability_and_the_same_draws_for_a_seed():
    """A_j = .06 and .10, .05, .05 of the next three: p = .9, a third of the value each."""
    share = []
    for seed in range(400):
        values = merged_values(seed)
        assert torch.equal(values, merged_values(seed))
        added = values - torch.arange(4)
        assert added.tolist() in ([0.0] * 4, [0.0, 5.0, 5.0, 5.0])
        share.append(float(added[1] > 0))
    assert sum(share) / len(share) == pytest.approx(0.9, abs=0.05)  # 3.3 standard deviations


def merged_values(seed):
    """Values 0 to 3 after the first token, of value 15, was evicted."""
    policy = build_policy("cam", {"budget": 3, "targets": 3}, None)
    value = torch.tensor([15.0, 1, 2, 3]).view(1, 1, 4, 1)
    one = [torch.tensor([x]) for x in (3, 4, 2, 9, seed)]
    slots = Slots(
        0,
        torch.arange(4)[None, None],
        torch.tensor([0.06, 0.10, 0.05, 0.05]).view(1, 1, 4, 1),
        value,
        value,
        Sequences(1, *one, {}),
    )
    evicted = torch.tensor([[[True, False, False, False]]])
    found = policy.merge(slots, evicted)
    result = merged(slots, found)[0].value.flatten()
    assert torch.equal(merged(slots, found)[0].key, value)
    return torch.cat([torch.zeros(1), result[1:]])
