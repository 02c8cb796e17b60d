"""The kernels that choose pages by bounds, beside loops over keys."""

from __future__ import annotations

import pytest
import torch

from tests.support import paged_cases as problems
from tests.support.paged_cases import Shape

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [[0, 7], [1, 90], [33, 80]]


def page_bounds(cache):
    """Return bounds of the live keys; pages that no list holds have arbitrary ones."""
    bounds = torch.full((len(cache.pages), 2, cache.pages.shape[-1]), 7.0, device=DEVICE)
    for row, lengths in enumerate(cache.lengths.tolist()):
        for head, length in enumerate(lengths):
            for start in range(0, length, cache.page_slots):
                page = cache.table[row, head, start // cache.page_slots]
                keys = cache.pages[page, 0, : length - start]
                bounds[page] = torch.stack([keys.amin(0), keys.amax(0)])
    return bounds


def best(query, keys, page, wanted, last):
    """Pages of a query head over keys [length, d], by brute force."""
    bounds = []
    for start in range(0, len(keys), page):
        low, high = keys[start : start + page].amin(0), keys[start : start + page].amax(0)
        bounds.append(float(torch.maximum(query * low, query * high).sum()))
    if last and bounds:
        bounds[-1] = float("inf")
    order = sorted(range(len(bounds)), key=lambda p: (-bounds[p], p))
    return set(order[:wanted])


@pytest.mark.parametrize(
    ("multiple", "group", "last", "equal"),
    [(1, 2, True, False), (2, 3, False, False), (1, 1, False, True)],
)
def test_the_best_pages_are_read_by_the_heads_that_chose_them(multiple, group, last, equal):
    """More pages than a program bounds, an unused place, and pages that are all alike."""
    from dms_train.kernels.decode import triton_attention, triton_bounds
    from dms_train.kernels.decode.types import AttentionTuning, PageBudget, PageSelection

    shape = Shape(group=group, page_slots=2, places=45, d=24, device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    cache = problems.filled_cache(shape, lengths)
    if equal:
        cache.pages.copy_(torch.where(cache.pages.isnan(), cache.pages, 0.5))
    query = torch.randn(3, 2 * group, 24, generator=shape.draw(), device=DEVICE)
    rows, count = torch.tensor([2, -1, 1], device=DEVICE), torch.tensor([3, 5, 99], device=DEVICE)
    wanted = PageBudget(count, multiple, last)
    memory = PageSelection.of(3, cache, group, multiple)
    read = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    triton_bounds.select_pages(query, cache, page_bounds(cache), rows, wanted, memory, read)
    some = cache._replace(table=memory.table, lengths=memory.lengths)
    places = torch.tensor([0, -1, 2], device=DEVICE)
    work = triton_attention.attention_workspace(query, cache, AttentionTuning(tile=16, per_sm=2))
    output = triton_attention.attend(query, some, places, 0.2, work, readers=memory.heads)
    page = 2 * multiple
    for i, row in ((0, 2), (2, 1)):
        for head in range(2):
            length, union = LENGTHS[row][head], set()
            number = cache.table[row, head, torch.arange(length, device=DEVICE) // 2].long()
            keys, values = cache.pages[number, :, torch.arange(length, device=DEVICE) % 2].unbind(1)
            for member in range(group):
                q = query[i, head * group + member]
                chosen = best(q, keys, page, int(count[i]), last)
                union |= chosen
                slots = [s for s in range(length) if s // page in chosen]
                weights = (keys[slots] @ q * 0.2).softmax(0)
                torch.testing.assert_close(
                    output[i, head * group + member], weights @ values[slots], rtol=1e-5, atol=1e-5
                )
            expected = sum(s // page in union for s in range(length))
            assert int(memory.lengths[i, head]) == int(read[row, head]) == expected
    assert read[0].tolist() == [0, 0]
    assert int(memory.lengths[1].sum()) == 0
