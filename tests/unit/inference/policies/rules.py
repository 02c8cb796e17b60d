"""Policies in both caches, and loops over their published rules with Python sets."""

from __future__ import annotations

import math

import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import NewTokens

HEADS, GROUP, SIZE, LENGTH = 2, 2, 6, 40
SCALE = 1 / math.sqrt(SIZE)
FREQUENCY = torch.tensor([1.0, 0.3, 0.07])  # of RoPE


def compact(policy, rows):
    pool = PagePool(
        head_size=SIZE,
        state_width=policy.state_width,
        dtype=torch.float64,
        device=torch.device("cpu"),
        page_slots=4,
        slab_pages=4,
    )
    return CompactCache(pool, policy, layers=1, rows=rows, heads=HEADS, frequency=FREQUENCY[None])


def dense(policy, rows):
    like = torch.zeros(0, SIZE, dtype=torch.float64)
    return DenseCache(
        policy, layers=1, rows=rows, heads=HEADS, like=like, frequency=FREQUENCY[None]
    )


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


def attend(cache, data, done, counts, layer=0):
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
    arrival = NewTokens(position, parts[1], parts[2], None)
    return cache.attend(layer, torch.tensor(list(counts)), parts[0], arrival)


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
