"""Caches without a model: against the visibility rule, and random traffic against bookkeeping."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import CachePolicy, Merge, NewTokens
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.window import WindowPolicy
from dms_train.method.accounting import live_slots
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible

HEADS, GROUP, SIZE, WINDOW = 3, 2, 4, 8
CPU = torch.device("cpu")


def pool_for(policy, *, dtype=torch.float64, page_slots=4, slab_pages=4):
    return PagePool(
        head_size=SIZE,
        state_width=policy.state_width,
        dtype=dtype,
        device=CPU,
        page_slots=page_slots,
        slab_pages=slab_pages,
    )


def compact(policy, *, layers=1, rows=2, **pool):
    return CompactCache(pool_for(policy, **pool), policy, layers=layers, rows=rows, heads=HEADS)


def dense(policy, *, layers=1, rows=2):
    like = torch.zeros(0, SIZE, dtype=torch.float64)
    return DenseCache(policy, layers=layers, rows=rows, heads=HEADS, like=like)


def text(length, rows=2, seed=0, share=0.5):
    """query, key, value [rows, ., length, SIZE] and decisions [rows, HEADS, length]."""
    draw = torch.Generator().manual_seed(seed)
    shape = (rows, HEADS * GROUP, length, SIZE)
    query = torch.randn(shape, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, rows, HEADS, length, SIZE, generator=draw, dtype=torch.float64)
    return query, key, value, torch.rand(rows, HEADS, length, generator=draw) < share


def unturned(rows, query, arrival):
    """Tokens whose RoPE is the identity, with the decisions of the arrival."""
    key, value = (x.transpose(1, 2).contiguous().unsqueeze(3) for x in (arrival.key, arrival.value))
    cos = query.new_ones(*arrival.position.shape, 1, 1, SIZE)
    return AttentionStep(
        query=query.transpose(1, 2).contiguous().unflatten(2, (HEADS, GROUP)),
        key=key,
        value=value,
        cos=cos,
        sin=torch.zeros_like(cos),
        position=arrival.position.contiguous(),
        rows=rows,
        decision_projection=lambda: arrival.signal,
    )


def feed(cache, data, chunks):
    """Attend chunk by chunk. Outputs, reads and live tokens after each chunk."""
    query, key, value, decisions = data
    rows = torch.arange(query.shape[0])
    outputs, reads, live, start = [], [], [], 0
    for n in chunks:
        part = slice(start, start + n)
        position = torch.arange(start, start + n).expand(len(rows), n)
        arrival = NewTokens(position, key[:, :, part], value[:, :, part], decisions[:, :, part])
        done = cache.step(0, unturned(rows, query[:, :, part], arrival))
        outputs.append(done.output)
        reads.append(done.reads)
        live.append(cache.live(rows)[0])
        start += n
    return torch.cat(outputs, 2), torch.stack(reads), torch.stack(live)


def masked(data, allowed):
    """Attention with a bool mask [rows, HEADS, T, T]."""
    query, key, value, _ = data
    repeat = [x.repeat_interleave(GROUP, 1) for x in (key, value, allowed)]
    scores = query @ repeat[0].transpose(-1, -2) / math.sqrt(SIZE)
    return scores.masked_fill(~repeat[2], -torch.inf).softmax(-1) @ repeat[1]


LENGTH = 36
CHUNKS = [
    (1,) * LENGTH,
    (LENGTH,),
    (7,) * 5 + (1,),
    (12,) + (1,) * 24,
    (1, 11, 1, 1, 1, 14, 7),
]


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)}chunks")
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_equals_the_visibility_rule(build, chunks, shift, eviction, share):
    spec = PRESETS["dms"].override(window=WINDOW, decision_shift=shift, eviction=eviction)
    data = text(LENGTH, share=share)
    output, reads, live = feed(build(DMSPolicy(WINDOW, spec.governing_shift)), data, chunks)
    allowed = visible(data[3], spec)
    torch.testing.assert_close(output, masked(data, allowed))
    ends = torch.tensor(chunks).cumsum(0) - 1
    assert torch.equal(live, live_slots(data[3], spec)[..., ends].permute(2, 0, 1))
    assert torch.equal(reads.sum(0), allowed.sum((2, 3)))


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)}chunks")
def test_sinks_stay_although_they_are_marked(build, chunks):
    spec = PRESETS["dms"].override(window=WINDOW)
    data, sinks = text(LENGTH, share=0.9), torch.arange(LENGTH) < 3
    policy = build_policy("dms", {"sinks": 3}, spec)
    assert isinstance(policy.kernel_rule(), str)  # a reason
    output, reads, _ = feed(build(policy), data, chunks)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed = visible(data[3], spec)
    assert not allowed[..., -1, sinks].all()
    allowed = allowed | (causal & sinks)
    torch.testing.assert_close(output, masked(data, allowed))
    assert torch.equal(reads.sum(0), allowed.sum((2, 3)))


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)}chunks")
def test_keep_all_and_window(build, chunks):
    data, i = text(LENGTH), torch.arange(LENGTH)
    causal = (i[None] <= i[:, None]).expand(2, HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(feed(build(KeepAllPolicy()), data, chunks)[0], masked(data, causal))
    near = causal & (i[:, None] - i[None] <= WINDOW)
    output, _, live = feed(build(WindowPolicy(WINDOW)), data, chunks)
    torch.testing.assert_close(output, masked(data, near))
    assert (live[-1] == WINDOW + 1).all()


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("clear_after_rope", [False, True])
def test_tokens_before_rope_are_decided_cleared_and_rotated(build, clear_after_rope):
    """Against RoPE as a product of complex numbers and attention under the visibility rule."""
    spec = PRESETS["dms"].override(window=WINDOW, clear_after_rope=clear_after_rope, alpha_offset=0)
    query, key, value, _ = text(30)
    first = query[:, ::GROUP, :, spec.channel]
    decisions = spec.alpha_scale * first > 0
    angle = torch.arange(30)[:, None] * torch.tensor([0.7, 0.2], dtype=torch.float64)

    def turned(x):
        pairs = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angle)
        return torch.cat([pairs.real, pairs.imag], -1)

    cleared = query.clone()
    cleared[:, ::GROUP, :, spec.channel] = 0
    cleared = turned(cleared)
    if clear_after_rope:
        cleared[:, ::GROUP, :, spec.channel] = 0
    expected = masked((cleared, turned(key), value, decisions), visible(decisions, spec))
    cache, outputs = build(DMSPolicy(WINDOW, spec.governing_shift)), []
    table = torch.cat([angle, angle], -1)[:, None, None]
    for part in (slice(0, 11), slice(11, 12), slice(12, 30)):
        position = torch.arange(30)[part].expand(2, -1)
        arrival = NewTokens(position, key[:, :, part], value[:, :, part], None)
        step = unturned(torch.arange(2), query[:, :, part], arrival)
        step = step._replace(
            cos=table[part].cos().expand(2, -1, -1, -1, -1),
            sin=table[part].sin().expand(2, -1, -1, -1, -1),
            spec=spec,
            decision_projection=None,
        )
        outputs.append(cache.step(0, step).output)
    assert 0.2 < decisions.double().mean() < 0.8
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


def test_arriving_tokens_take_the_slots_of_evicted_ones():
    """Decoding with everything evicted touches the same pages throughout."""
    cache = compact(WindowPolicy(WINDOW))
    feed(cache, text(60), (1,) * 60)
    assert cache.pool.allocator.used == 2 * HEADS * 3  # 9 tokens in pages of 4
    assert cache.pool.allocator.slabs == list(range(5))  # 18 pages, 4 to a slab
    assert cache.peak_bytes == cache.allocated_bytes


def test_bfloat16_storage():
    data = text(60)
    cache = compact(DMSPolicy(WINDOW, 1), dtype=torch.bfloat16)
    low = tuple(x.bfloat16() for x in data[:3]) + data[3:]
    output = feed(cache, low, (20,) + (1,) * 40)[0]
    exact = masked(tuple(x.double() for x in low[:3]) + data[3:], visible(data[3], SPEC))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, atol=2e-2, rtol=2e-2)


SPEC = PRESETS["dms"].override(window=WINDOW)


def consistent(cache, expected):
    """Every live token is stored once, in pages of one list only."""
    owned = []
    for layer, table in enumerate(cache._tables):
        owned += table[table >= 0].tolist()
        held = -(-cache._lengths[layer] // cache.pool.page_slots)
        assert torch.equal((table >= 0).sum(-1), held)
    assert len(owned) == len(set(owned)) == cache.pool.allocator.used
    for (layer, row), positions in expected.items():
        kv_lists = cache._kv_lists(layer, torch.tensor([row]))
        stored = cache._stored(layer, cache._numbers(*kv_lists), content=True)
        for head, expected_positions in enumerate(positions):
            live = stored.position[0, head] >= 0
            assert sorted(stored.position[0, head][live].tolist()) == expected_positions
            mark = stored.position[0, head][live].double() + 1000 * row + 100_000 * layer
            assert torch.equal(stored.key[0, head][live][:, 0], mark)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "eviction"),
    [(120, "delayed"), (60, "immediate"), pytest.param(1500, "delayed", marks=pytest.mark.slow)],
)
def test_random_traffic(steps, eviction):
    """Chunks of any size into any rows of two layers, rows freed at random."""
    spec = PRESETS["dms"].override(window=3, eviction=eviction)
    chance, rows, layers = random.Random(steps), 4, 2
    draw = torch.Generator().manual_seed(steps)
    cache = compact(DMSPolicy(3, spec.governing_shift), layers=layers, rows=rows, slab_pages=8)
    history = {(layer, row): [] for layer in range(layers) for row in range(rows)}
    insertions = 0
    for step in range(steps):
        if chance.random() < 0.05:
            row = chance.randrange(rows)
            cache.free(torch.tensor([row]))
            history.update({(layer, row): [] for layer in range(layers)})
            continue
        chosen = chance.sample(range(rows), chance.randrange(1, rows + 1))
        counts = [chance.choice((0, 1, 1, 1, 5, 23)) for _ in chosen]
        n = max(*counts, 1)
        left = chance.random() < 0.5
        for layer in range(layers):
            position = torch.full((len(chosen), n), -1)
            signal = torch.rand(len(chosen), HEADS, n, generator=draw) < chance.random()
            for index, (row, count) in enumerate(zip(chosen, counts, strict=True)):
                seen = history[layer, row]
                part = slice(n - count, n) if left else slice(0, count)
                position[index, part] = torch.arange(len(seen), len(seen) + count)
                seen += signal[index, :, part].T.tolist()
            offset = torch.tensor(chosen) * 1000 + 100_000 * layer
            key = (position + offset[:, None]).double()[:, None, :, None]
            key = key.expand(-1, HEADS, n, SIZE)
            query = torch.zeros(len(chosen), HEADS * GROUP, n, SIZE, dtype=torch.float64)
            cache.attend(layer, torch.tensor(chosen), query, NewTokens(position, key, key, signal))
            insertions += HEADS * sum(counts)
        if step % 10 == 0:
            consistent(cache, {at: survivors(seen, spec) for at, seen in history.items()})
    print(f"{insertions} insertions checked")
    assert cache.pool.peak_bytes > cache.pool.allocated_bytes or steps < 100
    cache.free(torch.arange(rows))
    assert cache.pool.allocated_bytes == cache.pool.allocator.used == 0
    assert all(table.numel() == 0 for table in cache._tables)


def survivors(seen, spec):
    if not seen:
        return [[] for _ in range(HEADS)]
    last = visible(torch.tensor(seen).T, spec)[:, -1]
    return [row.nonzero().flatten().tolist() for row in last]


class Tova(CachePolicy):
    """Drops the token that the last query read least."""

    state_width, scored = 1, True

    def __init__(self, budget):
        self.budget = budget

    def observe(self, slots, received):
        mean = received.newest.mean((1, 2))[:, None, :, None]
        return mean.expand_as(slots.state).to(slots.state.dtype)

    def evict_mask(self, slots, at):
        held = slots.position >= 0
        score = slots.state[..., 0].masked_fill(~held, torch.inf)
        least = torch.zeros_like(held).scatter(2, score.argmin(2, keepdim=True), True)
        return (least & (held.sum(2, keepdim=True) > self.budget))[:, :, None]


def test_scored_policies_fit():
    """An evicted token is the same for all heads of a layer."""
    data = text(30)
    cache = compact(Tova(6))
    output, _, live = feed(cache, data, (1,) * 30)
    kept = torch.zeros(2, HEADS, 30, dtype=torch.bool)
    for t in range(30):
        kept[:, :, t] = True
        query = tuple(x[:, :, t : t + 1] if i == 0 else x for i, x in enumerate(data))
        torch.testing.assert_close(output[:, :, t : t + 1], masked(query, kept[:, :, None]))
        scores = query[0] @ data[1].repeat_interleave(GROUP, 1).transpose(-1, -2) / 2
        hidden = ~kept[:, :, None].repeat_interleave(GROUP, 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)[:, :, 0].mean(1)
        if t >= 6:
            worst = weights.masked_fill(~kept[:, 0], torch.inf).argmin(-1)
            kept[torch.arange(2), :, worst] = False
        assert torch.equal(live[t], kept.sum(-1))


class PairMean(CachePolicy):
    """Folds every odd token into its predecessor as their mean."""

    needs_content = True

    def evict_mask(self, slots, at):
        return (slots.position % 2 == 1)[:, :, None]

    def merge(self, slots, evicted):
        newest = slots.position.amax(2, keepdim=True)
        target = (slots.position == newest - 1) & (newest % 2 == 1)
        source = target.any(2, keepdim=True) & (slots.position == newest)
        half = torch.full((int(target.sum()),), 0.5)
        scale = torch.where(target, 0.5, 1.0)
        places = (mask.flatten().nonzero().flatten() for mask in (source, target))
        return Merge(*places, half, half, scale, scale)


def test_merging_policies_fit():
    data = text(21)
    output, _, live = feed(compact(PairMean()), data, (1,) * 21)
    pairs = [x[:, :, :20].unflatten(2, (10, 2)).mean(3) for x in data[1:3]]
    merged = [torch.cat([p, x[:, :, 20:]], 2) for p, x in zip(pairs, data[1:3], strict=True)]
    everything = torch.ones(2, HEADS, 1, 11, dtype=torch.bool)
    expected = masked((data[0][:, :, 20:], *merged, None), everything)
    torch.testing.assert_close(output[:, :, 20:], expected)
    assert live[-1].unique().tolist() == [11]
    with pytest.raises(InferenceError, match="merges"):
        dense(PairMean())


class EvenReader(CachePolicy):
    """Reads even positions only, for the second query head of each group."""

    def select(self, slots, query):
        even = (slots.position % 2 == 0)[:, :, None]
        return torch.cat([torch.ones_like(even), even], 2)


@pytest.mark.parametrize("build", [compact, dense])
def test_partial_reading_fits(build):
    data, i = text(20), torch.arange(20)
    output, reads, live = feed(build(EvenReader()), data, (1,) * 20)
    causal = (i[None] <= i[:, None]).expand(2, HEADS, 20, 20)
    torch.testing.assert_close(output[:, ::GROUP], masked(data, causal)[:, ::GROUP])
    half = masked(data, causal & (i % 2 == 0))
    torch.testing.assert_close(output[:, 1::GROUP], half[:, 1::GROUP])
    assert live[-1].unique().tolist() == [20]
    assert reads.sum(0).unique().tolist() == [210]
