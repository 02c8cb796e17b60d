"""Batches of the vLLM plugin against masked attention in float64; steps that are captured."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.sizes import CacheSizes
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import FP8
from dms_train.method.accounting import live_slots
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible
from dms_train.vllm_plugin import mixed_steps
from dms_train.vllm_plugin.batch import (
    BatchAttention,
    StepInputs,
    batch_attention,
    compile_steps,
)
from dms_train.vllm_plugin.cache import GrantedCache, GrantedPool
from dms_train.vllm_plugin.mixed_steps import Kind, MixedSteps
from tests.support.host_reads import HostReads

pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(torch.device("cpu")), reason="needs triton's interpreter"
)
LAYERS, ROWS, HEADS, GROUP, SIZE, LENGTH = 2, 5, 2, 2, 16, 26
PAGE, PAGES = 4, 160
SPEC = PRESETS["dms"].override(window=5).spec
# batches: row and number of tokens of each request; single tokens first, as vLLM sorts them
BATCHES = [
    [(3, 1), (1, 9)],
    [(3, 1), (1, 4)],
    [(1, 1), (3, 1), (0, 12)],
    *[[(0, 1), (3, 1), (1, 1)]] * 7,
    [(0, 1), (3, 1), (1, 1), (2, 6)],
    [(0, 1), (1, 1), (2, 1), (3, 1), (4, 5)],
    [(0, 1), (2, 1), (1, 1), (4, 6)],  # padded in the place of row 3
    [(0, 1), (2, 4), (4, 3)],
    [(3, 1), (0, 1)],
]


def rope_table(layer):
    angle = torch.arange(LENGTH)[:, None] * (0.3 + 0.2 * layer) ** torch.arange(SIZE // 2)
    return torch.cat([angle.cos(), angle.sin()], 1)


def tokens_of(row):
    """Return query [layers, n, h, d], key and value [layers, n, g, d] of the request in a row."""
    draw = torch.Generator().manual_seed(row)
    query = torch.randn(LAYERS, LENGTH, HEADS * GROUP, SIZE, generator=draw)
    key, value = torch.randn(2, LAYERS, LENGTH, HEADS, SIZE, generator=draw)
    return query, key, value


def decisions(query):
    """Read the eviction channel of the first query head of each group: bool [layers, g, n]."""
    activation = query[:, :, ::GROUP, SPEC.channel % SIZE]
    return (activation * SPEC.alpha_scale - SPEC.alpha_offset > 0).transpose(1, 2)


def truth(row):
    """Masked attention in float64 [layers, n, h, d], and live tokens [layers, g, n]."""
    query, key, value = tokens_of(row)
    evicts = decisions(query)
    query = query.clone()
    query[:, :, ::GROUP, SPEC.channel % SIZE] = 0
    tables = torch.stack([rope_table(layer) for layer in range(LAYERS)])
    cos, sin = (torch.cat([x, x], 2)[:, :, None].double() for x in tables.chunk(2, 2))

    def rotate(x):
        first, second = x.double().chunk(2, -1)
        return x.double() * cos + torch.cat([-second, first], -1) * sin

    query, key, value = (x.transpose(1, 2) for x in (rotate(query), rotate(key), value.double()))
    key, value = (x.repeat_interleave(GROUP, 1) for x in (key, value))
    seen = visible(evicts, SPEC).repeat_interleave(GROUP, 1)
    scores = (query @ key.transpose(2, 3) / math.sqrt(SIZE)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), live_slots(evicts, SPEC)


TRUTH = {row: truth(row) for row in range(ROWS)}


def new_cache(stored=None):
    sizes = {"head_size": SIZE, "dtype": torch.float32, "page_slots": PAGE}
    pool = GrantedPool(device=torch.device("cpu"), stored=stored, **sizes)
    sizes = CacheSizes(LAYERS, ROWS, HEADS, GROUP, LENGTH)
    cache = GrantedCache(pool, SPEC, sizes, [None] * LAYERS)
    raw = torch.zeros((PAGES + 1) * pool.page_slots * pool.slot_bytes, dtype=torch.int8)
    pool.bind(raw.view(torch.uint8 if stored == FP8 else torch.float32))
    return cache


def new_inputs():
    """Inputs of layers of which each has a table of its own."""
    return StepInputs([rope_table(layer) for layer in range(LAYERS)], requests=ROWS)


class Requests:
    """Requests that have come to some token, by row."""

    def __init__(self):
        self.seen = dict.fromkeys(range(ROWS), 0)

    def take(self, batch):
        """Return the positions, and query, key and value by layer; the requests move on."""
        position, columns = [], ([], [], [])
        for row, count in batch:
            now = slice(self.seen[row], self.seen[row] + count)
            position += range(now.start, now.stop)
            for column, x in zip(columns, tokens_of(row), strict=True):
                column.append(x[:, now])
            self.seen[row] += count
        return torch.tensor(position), *(torch.cat(column, 1) for column in columns)


def described(cache, inputs, requests, batch):
    """Describe a batch as vLLM's model state does; also its position, query, key and value."""
    counts = [count for _, count in batch]
    computed = [requests.seen[row] for row, _ in batch]
    position, *columns = requests.take(batch)
    inputs.set_rows(torch.tensor([row for row, _ in batch], dtype=torch.int32))
    fields = {
        "num_scheduled_tokens": np.array(counts),
        "query_start_loc_np": np.cumsum([0, *counts]),
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0),
        "num_computed_tokens_np": np.array(computed),
    }
    of_vllm = SimpleNamespace(positions=position, num_tokens=sum(counts), **fields)
    return batch_attention(cache, inputs, of_vllm), position, *columns


def run_eager(cache, inputs, requests, batch):
    """Run a batch layer by layer; return its outputs [layers, t, h, d]."""
    attention, _, query, key, value = described(cache, inputs, requests, batch)
    output = torch.full_like(query, torch.nan)
    for layer in range(LAYERS):
        attention.attend(layer, query[layer], key[layer], value[layer], output[layer])
    return output


class PaddedModel:
    """Layers of attention alone, in padded steps; a token id tells the row and the position."""

    def __init__(self, cache, inputs, tokens=16):
        self.cache, self.inputs, self.sizes = cache, inputs, []
        every = [torch.cat(column, 1) for column in zip(*map(tokens_of, range(ROWS)), strict=True)]
        self._query, self._key, self._value = every
        self.steps = MixedSteps(cache, inputs, self._forward, tokens=tokens)

    def _forward(self, batch, ids, position):
        self.sizes.append(len(ids))
        query, key, value = (x[:, ids] for x in (self._query, self._key, self._value))
        output = torch.full_like(query, torch.nan)
        for layer in range(LAYERS):
            batch.attend(layer, query[layer], key[layer], value[layer], output[layer])
        return output.transpose(0, 1).flatten(1)

    def run(self, requests, batch):
        """Return the outputs of a batch, [layers, t, h, d], and the sizes of the padded step."""
        attention, position, *_ = described(self.cache, self.inputs, requests, batch)
        rows = torch.tensor([row for row, count in batch for _ in range(count)])
        kind = self.steps.kind_of(attention, len(rows))
        hidden = self.steps.run(kind, attention, rows * LENGTH + position, position)
        return hidden.unflatten(1, (LAYERS, -1, SIZE)).transpose(0, 1), kind


def assert_true(cache, requests, batch, output, tolerance=1e-5):
    start = 0
    for row, count in batch:
        expected, live = TRUTH[row]
        now = slice(requests.seen[row] - count, requests.seen[row])
        found = output[:, start : start + count].double()
        torch.testing.assert_close(found, expected[:, now], rtol=tolerance, atol=tolerance)
        assert torch.equal(cache.lists.lengths[:, row].long(), live[..., now.stop - 1])
        start += count
    used = int(cache.lists.pages(cache.lists.lengths).sum())
    assert used + int(cache.pool.free.left) == PAGES


def true_pages(requests, rows):
    """Count the pages of the live tokens of requests."""
    live = [TRUTH[row][1][..., requests.seen[row] - 1] for row in rows]
    return [int((-(-lists // PAGE)).sum()) for lists in live]


def test_mixed_batches_attend_to_the_visible_tokens():
    cache, inputs, requests = new_cache(), new_inputs(), Requests()
    for batch in BATCHES:
        output = run_eager(cache, inputs, requests, batch)
        assert_true(cache, requests, batch, output)
        pages = true_pages(requests, [row for row, _ in batch])
        assert inputs.pages[: len(batch)].tolist() == pages
    assert int(cache.lists.lengths[:, 1].sum()) < 0.8 * requests.seen[1] * LAYERS * HEADS


def test_padded_steps_attend_to_the_visible_tokens():
    cache, inputs, requests = new_cache(), new_inputs(), Requests()
    model, kinds = PaddedModel(cache, inputs), set()
    for batch in BATCHES:
        if batch[-1][1] == 1:
            run_eager(cache, inputs, requests, batch)
            continue
        output, kind = model.run(requests, batch)
        kinds.add(kind)
        assert_true(cache, requests, batch, output)
        pages = true_pages(requests, [row for row, _ in batch])
        assert inputs.pages[: len(batch)].tolist() == pages
    assert kinds == {Kind(16, ROWS, 1), Kind(16, ROWS, 2)}
    assert set(model.sizes) == {16}


def test_steps_have_the_smallest_size_that_holds_them(monkeypatch):
    monkeypatch.setattr(mixed_steps, "_TOKENS", (4, 8, 16))
    monkeypatch.setattr(mixed_steps, "_SINGLES", (2,))
    cache, inputs, requests = new_cache(), new_inputs(), Requests()
    model = PaddedModel(cache, inputs)
    model.steps.compile()
    sizes = [(4, 2), (4, 4), (8, 2), (8, ROWS), (16, 2), (16, ROWS)]
    captured = [Kind(*size, parts) for size in reversed(sizes) for parts in (2, 1)]
    assert model.steps._kinds() == captured
    expected = {
        ((0, 2),): (4, 2, 1),
        ((0, 1), (1, 2)): (4, 2, 1),
        ((0, 1), (1, 3), (2, 4)): (8, 2, 2),
        ((0, 1), (1, 1), (2, 1), (3, 5)): (8, ROWS, 1),
        ((0, 1), (1, 1), (2, 1), (4, 13)): (16, ROWS, 1),
    }
    for batch, kind in expected.items():
        output, used = model.run(requests, batch)
        assert used == kind
        assert used in captured
        assert_true(cache, requests, batch, output)
        assert inputs.pages[: len(batch)].tolist() == true_pages(
            requests, [row for row, _ in batch]
        )


def test_few_pages_limit_what_is_compiled():
    cache, inputs = new_cache(), new_inputs()
    for pages, parts in ((LAYERS * HEADS, {1}), (2 * LAYERS * HEADS, {1, 2}), (1, set())):
        cache.pool.bind(
            torch.zeros((pages + 1) * cache.pool.page_slots * cache.pool.slot_bytes // 4)
        )
        steps = PaddedModel(cache, inputs).steps
        assert {kind.parts for kind in steps._kinds()} == parts
        steps.compile()
        assert int(cache.pool.free.left) == pages
        assert not cache.pool.free.fault.any()


def test_other_batches_are_not_padded():
    cache, inputs = new_cache(), new_inputs()
    steps = PaddedModel(cache, inputs).steps
    for batch in ([(0, 1)], [(0, 2), (1, 2), (2, 2)], [(0, 17)]):
        attention, position, *_ = described(cache, inputs, Requests(), batch)
        assert steps.kind_of(attention, len(position)) is None


class Captured:
    """A decode step of SLOTS requests: a replay runs the same calls on the same memory."""

    SLOTS = 4

    def __init__(self, cache, inputs):
        self.inputs = inputs
        self.position = torch.zeros(self.SLOTS, dtype=torch.int64)
        shape = LAYERS, self.SLOTS
        self.query = torch.zeros(*shape, HEADS * GROUP, SIZE)
        self.key, self.value = torch.zeros(2, *shape, HEADS, SIZE)
        self.output = torch.zeros_like(self.query)
        starts = torch.arange(self.SLOTS + 1)
        self._batch = BatchAttention(cache, inputs, self.position, starts, self.SLOTS, [])
        inputs.set_rows(self.position[:0].int())  # the dummy batch of a capture
        self.replay()

    def replay(self):
        for layer in range(LAYERS):
            each = (x[layer] for x in (self.query, self.key, self.value, self.output))
            self._batch.attend(layer, *each)

    def run(self, requests, rows):
        """Write the inputs of some rows, then replay; padding keeps what lay there before."""
        position, *columns = requests.take([(row, 1) for row in rows])
        self.inputs.set_rows(torch.tensor(rows, dtype=torch.int32))
        self.position[: len(rows)] = position
        for memory, x in zip((self.query, self.key, self.value), columns, strict=True):
            memory[:, : len(rows)] = x
        self.replay()
        return self.output


def addresses(cache, inputs):
    free = cache.pool.free
    kept = [*cache.view(0)[:4], free.numbers, free.left, free.fault, free.holders]
    return [x.data_ptr() for x in (*kept, inputs.rows, inputs.angles, inputs.pages)]


def test_replays_of_one_step_attend_to_the_visible_tokens():
    cache, inputs, requests = new_cache(), new_inputs(), Requests()
    step = Captured(cache, inputs)
    before = addresses(cache, inputs)
    for batch in BATCHES[:3]:
        run_eager(cache, inputs, requests, batch)
    for rows in ([3, 0], [1, 3, 0], [2], [0, 2, 1, 3], [3, 1], [2, 3, 1, 0], [1, 2, 0]):
        output = step.run(requests, rows)
        assert_true(cache, requests, [(row, 1) for row in rows], output)
        assert not output[:, len(rows) :].any()
        assert inputs.pages[: len(rows)].tolist() == true_pages(requests, rows)
    mixed = [(2, 1), (4, 7)]  # with a prompt, between replays
    assert_true(cache, requests, mixed, run_eager(cache, inputs, requests, mixed))
    assert_true(cache, requests, [(4, 1), (2, 1)], step.run(requests, [4, 2]))
    assert addresses(cache, inputs) == before


@pytest.mark.parametrize("stored", [None, FP8])
def test_padding_stores_nothing(stored):
    cache, inputs, requests = new_cache(stored), new_inputs(), Requests()
    step = Captured(cache, inputs)
    run_eager(cache, inputs, requests, [(0, 13), (1, 15)])
    step.run(requests, [0, 1])
    state = [x for x in (*cache.view(0), *cache.view(1), *cache.pool.free) if torch.is_tensor(x)]
    before = [x.clone() for x in state]
    inputs.set_rows(torch.zeros(0, dtype=torch.int32))  # positions and tokens of rows 0 and 1 stay
    step.replay()
    for x, y in zip(state, before, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("stored", [None, FP8])
def test_compiling_stores_nothing(stored, monkeypatch):
    """Rows and pages are empty after what runs before the first request."""
    cache, inputs = new_cache(stored), new_inputs()
    inputs.set_rows(torch.arange(ROWS))
    sizes, attend = [], cache.attend
    monkeypatch.setattr(
        cache,
        "attend",
        lambda layer, step, output: (sizes.append(len(step.rows)), attend(layer, step, output)),
    )
    compile_steps(cache, inputs, heads=HEADS * GROUP, dtype=torch.float32)
    assert sizes == [size for size in (1, 2, 3, 4, ROWS) for _ in range(LAYERS)]
    assert inputs.rows.tolist() == [-1] * ROWS
    PaddedModel(cache, inputs).steps.compile()
    assert not cache.lists.lengths.any()
    assert int(cache.pool.free.left) == PAGES
    assert not cache.pool.free.fault.any()


def test_fp8_pages_lose_little():
    cache, inputs, requests = new_cache(FP8), new_inputs(), Requests()
    model = PaddedModel(cache, inputs)
    for number, batch in enumerate(BATCHES):
        if number % 2 and batch[-1][1] > 1:
            output, _ = model.run(requests, batch)
        else:
            output = run_eager(cache, inputs, requests, batch)
        assert_true(cache, requests, batch, output, tolerance=0.15)
    assert cache.view(0).exponents.any()


@pytest.mark.parametrize("stored", [None, FP8])
def test_the_host_never_waits(stored):
    cache, inputs, requests = new_cache(stored), new_inputs(), Requests()
    model = PaddedModel(cache, inputs)
    with HostReads("dms_train") as reads:
        for batch in BATCHES[:4]:
            run_eager(cache, inputs, requests, batch)
        model.run(requests, [(0, 1), (1, 2), (2, 3)])
        cache.held_pages(inputs.rows[:3])
        cache.free_row(3)
    assert reads.places == []


def test_scratch_memory_does_not_grow_with_every_batch_size():
    cache, inputs, requests = new_cache(), new_inputs(), Requests()
    for count in range(1, ROWS + 1):
        run_eager(cache, inputs, requests, [(row, 1) for row in range(count)])
    assert sorted(cache._memory) == [1, 2, 4, 8]
