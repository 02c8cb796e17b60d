"""Each policy keeps what loops over its published rule keep, in both caches."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest
import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.policy_hooks import merged
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import NewTokens, RequestSizes, Sequences, Slots
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.triattention import QueryStatistics
from tests.support.matrix import FULL_MATRIX
from tests.support.query_statistics import statistics_file
from tests.unit.inference.policies.rules import (
    FREQUENCY,
    GROUP,
    HEADS,
    LENGTH,
    SCALE,
    SIZE,
    Rule,
    compact,
    dense,
    run,
    text,
)


class StreamingLLM(Rule):
    def before(self, t):
        last = max(1, self.budget - self.options.get("sinks", 4))
        first = self.budget - last
        for g, held in enumerate(self.held):
            self.held[g] = {j for j in held if j < first or t - j < last}


def turned(x, positions):
    """Vectors [n, SIZE] turned by RoPE, with complex numbers."""
    pairs = torch.complex(*x.chunk(2, -1)) * torch.exp(
        1j * torch.as_tensor(positions).double()[:, None] * FREQUENCY.double()
    )
    return torch.cat([pairs.real, pairs.imag], -1)


class StreamingLLMByCache(StreamingLLM):
    """Without RoPE, and then with the places among the tokens read as positions."""

    def weights(self, head, query, places):
        n, g = len(places), head // GROUP
        key = turned(turned(self.key[g, places], [-j for j in places]), range(n))
        own = turned(turned(self.query[head, query : query + 1], [-query]), [n - 1])[0]
        return (key @ own / math.sqrt(len(own))).softmax(0)


class MemoryPooling(Rule):
    """Means of segments, of keys without RoPE, which then get the position of the newest token."""

    def before(self, t):
        if t == 0:
            self.whole = self.key, self.value
        cr = int(self.options["cr"])
        self.held = [set(range(cr - 1, t, cr)) for _ in range(HEADS)]
        self.key, self.value = (x.clone() for x in self.whole)
        for last in [*self.held[0], t]:
            segment = list(range(last // cr * cr, last + 1))
            for g in range(HEADS):
                plain = turned(self.whole[0][g, segment], [-j for j in segment]).mean(0)
                self.key[g, last] = turned(plain[None], [last])[0]
                self.value[g, last] = self.whole[1][g, segment].mean(0)


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


class RoCo(Rule):
    """Sums over queries and query heads; the queries since a token entered are all later ones."""

    def seen(self, t, head, places, weights):
        score = self.score[head // GROUP]
        for place, weight in zip(places, weights.tolist(), strict=True):
            score.setdefault(place, []).append(weight)

    def evict(self, t):
        if self.options.get("prefill") == "dense" and t + 1 < self.request.prompt:
            return
        budget = self.budget
        recent = self.options.get("recent", budget // 4)
        varied = min(self.options.get("varied", budget // 2), budget - recent)
        for g in range(HEADS):
            mean = {j: sum(self.score[g][j]) / len(self.score[g][j]) for j in self.held[g]}
            deviation = {j: statistics.pstdev(self.score[g][j]) for j in self.held[g]}
            last = set(range(t + 1 - recent, t + 1))
            others = sorted(self.held[g] - last, key=lambda j, d=deviation: (-d[j], j))
            self.cut(g, mean, last | set(others[:varied]), budget)


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


class RKV(Rule):
    def evict(self, t):
        prompt, interval = self.request.prompt, self.options["interval"]
        if t + 1 < prompt or (t + 1 - prompt) % interval:
            return
        window, kernel = self.options["window"], self.options["kernel"]
        weight = self.options.get("importance", 0.07)
        for g, held in enumerate(self.held):
            places = sorted(held)
            first = [j for j in places if j < t + 1 - window]
            queries = range(max(0, t + 1 - window), t + 1)
            importance = torch.zeros(len(first), dtype=torch.float64)
            for query in queries:
                own = self.query[g * GROUP : (g + 1) * GROUP, query]
                importance += (own @ self.key[g, first].T * SCALE).amax(0).softmax(0)
            pooled = [
                float(importance[max(0, i - kernel // 2) : i + kernel // 2 + 1].max())
                for i in range(len(first))
            ]
            repeated = self.redundancy(g, places)
            score = {
                j: weight * p / len(queries) - (1 - weight) * r
                for j, p, r in zip(first, pooled, repeated, strict=False)
            }
            last = set(range(t + 1 - min(window, self.budget), t + 1))
            self.cut(g, score | dict.fromkeys(queries, -math.inf), last, self.budget)

    def redundancy(self, g, places):
        unit = self.key[g, places] / self.key[g, places].norm(dim=1, keepdim=True)
        cosine = [[float(a @ b) for b in unit] for a in unit]
        for i, row in enumerate(cosine):
            row[i] = 0.0
            similar = [n for n, c in enumerate(row) if c > self.options.get("threshold", 0.5)]
            if similar or not self.options.get("fix_empty_rows"):
                row[max(similar, default=0)] = 0.0
        mean = torch.tensor(cosine, dtype=torch.float64).mean(0)
        return mean.softmax(0).tolist()


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


class TriAttention(Rule):
    """Future logits of the mean query, one distance after the other, with complex numbers."""

    def evict(self, t):
        prompt, interval = self.request.prompt, self.options["interval"]
        if t + 1 < prompt or (t + 1 - prompt) % interval:
            return
        queries = QueryStatistics.load(Path(self.options["statistics"]))
        for g, held in enumerate(self.held):
            places = sorted(held)
            best = dict.fromkeys(places, -math.inf)
            for head in range(g * GROUP, (g + 1) * GROUP):
                mean, norm = queries.mean[0, head].double(), queries.norm[0, head].double()
                scores = [self.expected(mean, norm, g, j, t) for j in places]
                centre, width = statistics.mean(scores), statistics.pstdev(scores)
                for j, score in zip(places, scores, strict=True):
                    best[j] = max(best[j], (score - centre) / width)
            self.cut(g, best, set(), self.budget)

    def expected(self, mean, norm, g, j, t):
        pairs, query = torch.complex(*self.key[g, j].chunk(2)), torch.complex(*mean.chunk(2))
        pairs = pairs * torch.exp(-1j * j * FREQUENCY.double())  # without RoPE
        most = self.options["farthest"]
        total, distances = 0.0, [x for x in range(1, most + 1) if x & (x - 1) == 0]
        for distance in distances:
            angle = FREQUENCY.double() * (t + distance - j) + query.angle() - pairs.angle()
            total += float((query.abs() * pairs.abs() * angle.cos()).sum())
        concentration = query.abs() / norm
        return total / len(distances) + float(((1 - concentration) * norm * pairs.abs()).sum())


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
QUERIES = {
    "statistics": statistics_file(1, HEADS * GROUP, SIZE, tuple(FREQUENCY.tolist())),
    "farthest": 8,
}
CASES = [
    ("streaming_llm", {"budget": 9, "sinks": 2}, StreamingLLM),
    ("streaming_llm", {"cr": 3.0}, StreamingLLM),
    ("streaming_llm", {"cr": 2.0, "sinks": 2, "budget_mode": "growing"}, StreamingLLM),
    ("streaming_llm", {"budget": 9, "sinks": 2, "positions": "cache"}, StreamingLLMByCache),
    (
        "streaming_llm",
        {"cr": 2.0, "sinks": 3, "budget_mode": "growing", "positions": "cache"},
        StreamingLLMByCache,
    ),
    ("memory_pooling", {"cr": 4}, MemoryPooling),
    ("h2o", {"budget": 9}, H2O),
    ("h2o", {"cr": 2.0, "budget_mode": "growing"}, H2O),
    ("tova", {"cr": 2.0, "budget_mode": "input"}, TOVA),
    ("h2o", {"cr": 3.0, "prefill": "dense"}, H2O),
    ("cam", {"budget": 9, "expected": True, "targets": 3}, CaM),
    ("cam", {"cr": 3.0, "prefill": "dense", "expected": True, "targets": 20}, CaM),
    ("roco", {"budget": 9}, RoCo),
    ("roco", {"cr": 3.0, "prefill": "dense", "recent": 3, "varied": 20}, RoCo),
    ("tova", {"budget": 7}, TOVA),
    ("tova", {"cr": 4.0, "scope": "group", "protect_last": True}, TOVA),
    ("snapkv", {"budget": 12, **SNAP}, SnapKV),
    ("snapkv", {"cr": 3.0, **SNAP, "pool": "avg", "kernel": 5}, SnapKV),
    ("r_kv", {"budget": 12, "window": 4, "kernel": 3, "interval": 5}, RKV),
    (
        "r_kv",
        {
            "cr": 3.0,
            "window": 3,
            "kernel": 5,
            "interval": 7,
            "importance": 0.5,
            "threshold": 0.2,
            "fix_empty_rows": True,
        },
        RKV,
    ),
    ("knorm", {"budget": 8}, Knorm),
    ("keydiff", {"budget": 8}, KeyDiff),
    ("triattention", {"budget": 8, "interval": 5, **QUERIES}, TriAttention),
    ("triattention", {"cr": 3.0, "interval": 3, **QUERIES, "farthest": 3}, TriAttention),
    ("quest", {"budget": 12, "page": 4}, Quest),
    ("quest", {"budget": 8, "page": 4, "include_last_page": False}, Quest),
]


def runs():
    """(build, chunk) and a case: all with DMS_FULL_MATRIX=1, else each cache with one chunk."""
    chunks = (40, 7, 23)
    for number, case in enumerate(CASES):
        # a masked cache merges nothing
        builds = [compact] if case[2] in (CaM, MemoryPooling) else [compact, dense]
        pairs = list(itertools.product(builds, chunks))
        if not FULL_MATRIX:
            pairs = [(builds[0], chunks[number % 3]), (builds[-1], chunks[(number + 1) % 3])]
        yield from ((build, chunk, *case) for build, chunk in pairs)


@pytest.mark.parametrize(
    ("build", "chunk", "name", "options", "rule"),
    [*runs()],
    ids=lambda x: getattr(x, "__name__", str(x)[:40]),
)
def test_the_rule_is_kept_in_mixed_batches(build, chunk, name, options, rule):
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
        arrival = NewTokens(position, key[:, :, part], key[:, :, part], None)
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
