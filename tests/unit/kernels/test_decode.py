"""The decode kernels in Triton's interpreter (or on a GPU where there is one).

The interpreter cannot multiply bf16 matrices, and rounds fp32 to e4m3 wrongly where the mantissa
carries; both are tested in tests/gpu only.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dms_train.kernels.decode import reference
from dms_train.kernels.decode.types import (
    ALWAYS,
    FP8,
    LIST_FULL,
    NEVER,
    OUT_OF_PAGES,
    SIGNAL,
    AttentionTuning,
    Decisions,
    PagedCache,
)
from tests.support import paged_cases as problems
from tests.support.paged_cases import Shape

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def append():
    from dms_train.kernels.decode import triton_append

    return triton_append.append


@pytest.fixture
def attend():
    """Attention with a few programs, so that KV lists are cut in the middle."""
    from dms_train.kernels.decode import triton_attention as triton_decode

    def _attend(query, cache, rows, scale, per_sm=1, sinks=None):
        tuning = AttentionTuning(tile=16, per_sm=per_sm)
        memory = triton_decode.attention_workspace(query, cache, tuning)
        output = triton_decode.attend(query, cache, rows, scale, memory, sinks=sinks)
        assert int(memory.arrived.abs().sum()) == 0
        return output

    return _attend


@pytest.mark.parametrize(("rows", "evicts", "stages"), [(2, True, 2), (3, True, 3), (1, False, 3)])
def test_tiles_on_their_way_of_few_kv_lists(rows: int, evicts: bool, stages: int) -> None:
    from dms_train.kernels.decode import triton_attention as triton_decode

    pages, lists = torch.empty(1, 2, 16, 64), torch.zeros(rows, 8, dtype=torch.int32)
    cache = PagedCache(pages, lists[..., None], lists, lists[..., None], None, None)
    query = torch.empty(rows, 32, 64)
    assert triton_decode.attention_workspace(query, cache, evicts=evicts).tuning.stages == stages


@pytest.mark.parametrize("name", sorted(problems.rules(5)))
@pytest.mark.parametrize("window", [1, 5])
def test_append_equals_the_loops(append, name, window):
    problems.check_append(
        append, Shape(window=window, device=DEVICE), problems.rules(window)[name], 16
    )


@pytest.mark.parametrize("name", ["keep_all", "kv_list", "immediate", "window"])
@pytest.mark.parametrize("loops", [False, True])
def test_shared_pages_are_copied_before_they_change(append, name, loops):
    function = reference.append if loops else append
    shape = Shape(d=24, window=5, places=8, device="cpu" if loops else DEVICE)
    problems.check_shared_pages(function, shape, problems.rules(5)[name], 11)


@pytest.mark.parametrize("d", [16, 24])
@pytest.mark.parametrize("group", [1, 3])
def test_append_of_odd_sizes(append, d, group):
    shape = Shape(d=d, group=group, heads=3, device=DEVICE)
    problems.check_append(append, shape, problems.rules(5)["kv_list"], 12)


@pytest.mark.parametrize(("per_sm", "sinks"), [(1, False), (3, True), (20, False), (20, True)])
@pytest.mark.parametrize("cache", [torch.float32, FP8])
@pytest.mark.parametrize(("d", "group"), [(16, 2), (24, 3), (32, 1)])
def test_attention_equals_float64(attend, per_sm, sinks, cache, d, group):
    """KV lists from empty to full, one place of the batch unused, programs without work."""
    dtype = torch.float16 if cache == FP8 else torch.float32
    shape = Shape(d=d, group=group, dtype=dtype, cache_dtype=cache, device=DEVICE, seed=per_sm)
    lengths = torch.tensor([[0, 5], [1, 64], [33, 16]], dtype=torch.int32, device=DEVICE)

    def few(*args, **more):
        return attend(*args, per_sm=per_sm, **more)

    tolerance = 1e-5 if cache == torch.float32 else 2e-3
    problems.check_attend(few, shape, lengths, tolerance, sinks=sinks)


@pytest.mark.parametrize("preset", ["dms", "dms_fastdms"])
@pytest.mark.parametrize("eviction", ["delayed", "immediate"])
def test_a_text_equals_the_visibility_rule(append, attend, preset, eviction):
    problems.check_visibility(append, attend, Shape(device=DEVICE), preset, 24, eviction=eviction)


def test_extreme_scores_stay_finite(attend):
    shape = Shape(device=DEVICE)
    lengths = torch.full((3, 2), 50, dtype=torch.int32, device=DEVICE)
    cache = problems.filled_cache(shape, lengths)
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    query = torch.full((3, 4, 16), 1e4, device=DEVICE)
    output = attend(query, cache, rows, 1.0)
    expected = reference.attend(query.cpu(), problems.copied(cache), rows.cpu(), 1.0)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pages", "places", "fault"), [(7, 16, OUT_OF_PAGES), (99, 1, LIST_FULL)])
def test_a_token_without_a_page_is_reported(append, pages, places, fault):
    """And changes nothing but its query."""
    shape = Shape(places=places, device=DEVICE)
    cache = problems.empty_cache(shape, pages)
    for t in range(8):
        at = torch.full((shape.rows,), t, device=DEVICE)
        append(problems.random_step(shape, at, t), cache, Decisions(NEVER))
    assert int(cache.free.fault) == fault
    stored = (cache.lengths + shape.page_slots - 1) // shape.page_slots
    assert int(cache.lengths.max()) == (8 if places > 1 else 4)
    assert int(stored.sum()) == min(pages, shape.rows * shape.heads * min(places, 2))


def test_decode_never_leaks_pages(append):
    """A window of 5 in pages of 4 needs two pages at most."""
    shape = Shape(device=DEVICE)
    cache = problems.empty_cache(shape)
    before = int(cache.free.left)
    for t in range(30):
        at = torch.full((shape.rows,), t, device=DEVICE)
        append(problems.random_step(shape, at, t), cache, Decisions(ALWAYS))
    assert before - int(cache.free.left) == 2 * shape.rows * shape.heads


def test_pages_of_another_slab_are_numbered_by_distance(append, attend):
    """Slabs before and behind the first one, in the same memory block."""
    shape = Shape(device=DEVICE)
    cache = problems.empty_cache(shape)
    block = torch.full((201, *cache.pages.shape[1:]), torch.nan, device=DEVICE)
    numbers = torch.cat([torch.arange(-100, 0), torch.arange(1, 101)])[::7].int().to(DEVICE)
    cache = cache._replace(
        pages=block[100:101],
        free=cache.free._replace(
            numbers=numbers, left=torch.full_like(cache.free.left, len(numbers)), holders=None
        ),
    )
    rule = Decisions(SIGNAL, shift=1)
    plain = problems.empty_cache(shape)
    for t in range(12):
        step = problems.random_step(shape, torch.full((shape.rows,), t, device=DEVICE), t)
        output = attend(append(step, cache, rule), cache, step.rows, 0.25)
        expected = attend(append(step, plain, rule), plain, step.rows, 0.25)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert int(cache.table.min()) < 0


def test_reference_keeps_what_the_rule_keeps():
    """The loops themselves, against dense attention under the visibility rule."""

    def append(step, cache, rule):
        return reference.append(step, cache, rule).to(step.query.dtype)

    problems.check_visibility(append, reference.attend, Shape(), "dms", 40)


@pytest.mark.parametrize("first", [1e-3, 1.0, 300.0])
def test_exponents_rise_with_the_content(first):
    """A later, larger token raises the page's exponent; the small ones keep their digits."""
    shape = Shape(rows=1, heads=1, cache_dtype=FP8)
    cache = problems.empty_cache(shape)
    for t, factor in enumerate((first, 100 * first, first)):
        step = problems.random_step(shape, torch.tensor([t]), t)
        step = step._replace(value=step.value * factor)
        reference.append(step, cache, Decisions(NEVER))
        _, values = reference.live_slots(cache, 0, 0)
        true = step.value[0, 0].double()
        assert float((values[t] - true).abs().max() / true.abs().max()) < 2**-4


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_large_tokens_do_not_degrade_an_fp8_cache(spread):
    """Attention stays within e4m3's digits of the exact cache however unequal the tokens are."""
    fp8 = Shape(rows=1, group=4, d=32, window=12, dtype=torch.bfloat16, cache_dtype=FP8)
    exact = dataclasses.replace(fp8, cache_dtype=torch.float64)
    caches, errors = [problems.empty_cache(s) for s in (fp8, exact)], []
    for t in range(60):
        step = problems.random_step(fp8, torch.tensor([t]), t, spread)
        query, _ = (reference.append(step, cache, Decisions(SIGNAL, shift=1)) for cache in caches)
        if t % 10 == 9:
            near, true = (reference.attend(query, c, step.rows, 32**-0.5) for c in caches)
            errors.append(float((near - true).norm() / true.norm()))
    assert 0.005 < sum(errors) / len(errors) < 0.1
