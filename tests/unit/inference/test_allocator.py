"""Random allocations and releases: nothing is owned twice, nothing leaks, slabs close."""

from __future__ import annotations

import random

import pytest
import torch

from dms_train.inference.cache.allocator import PageAllocator
from dms_train.inference.cache.pool import PagePool


@pytest.mark.parametrize("slab_pages", [1, 7, 64])
def test_random_operations(slab_pages):
    chance = random.Random(slab_pages)
    allocator = PageAllocator(slab_pages)
    held: list[list[int]] = []
    owned: set[int] = set()
    open_slabs: set[int] = set()
    operations = 40_000
    for step in range(operations):
        growing = (step // 5000) % 2 == 0
        if not held or chance.random() < (0.6 if growing else 0.4):
            pages, opened = allocator.allocate(chance.randrange(6))
            assert not owned & set(pages)
            assert len(set(pages)) == len(pages)
            assert not open_slabs & set(opened)
            owned |= set(pages)
            open_slabs |= set(opened)
            held.append(pages)
        else:
            pages = held.pop(chance.randrange(len(held)))
            owned -= set(pages)
            closed = allocator.release(pages)
            assert set(closed) <= open_slabs
            open_slabs -= set(closed)
        assert allocator.used == len(owned)
        if step % 50 == 0:
            assert open_slabs == set(allocator.slabs) == {p // slab_pages for p in owned}
    for pages in held:
        allocator.release(pages)
    assert allocator.used == 0
    assert allocator.slabs == []


def test_low_slabs_are_filled_first():
    allocator = PageAllocator(4)
    pages, opened = allocator.allocate(10)
    assert (pages, opened) == (list(range(10)), [0, 1, 2])
    allocator.release([1, 9, 8])
    assert allocator.slabs == [0, 1]
    assert allocator.allocate(1) == ([1], [])


def test_foreign_pages_are_refused():
    allocator = PageAllocator(4)
    pages, _ = allocator.allocate(2)
    allocator.release(pages[:1])
    for page in (pages[0], 77):
        with pytest.raises(ValueError, match="not in use"):
            allocator.release([page])


def test_pool_moves_bytes():
    pool = PagePool(
        head_size=8,
        state_width=1,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        page_slots=4,
        slab_pages=2,
    )
    assert pool.slot_bytes == 2 * 8 * 2 + 4 + 4
    assert pool.allocated_bytes == 0
    pages = pool.allocate(5)
    assert pool.allocated_bytes == 3 * 2 * pool.page_bytes
    slots = torch.tensor([0, 19, 7, 12])
    values = torch.randn(4, 8).bfloat16()
    pool.write(slots, {"key": values})
    assert torch.equal(pool.read("key", slots.view(2, 2)), values.view(2, 2, 8))
    assert not pool.read("key", torch.tensor([-1, 1])).any()
    pool.release(pages[2:])
    assert pool.allocated_bytes == 2 * pool.page_bytes
    pool.release(pages[:2])
    assert (pool.allocated_bytes, pool.peak_bytes) == (0, 6 * pool.page_bytes)


@pytest.mark.parametrize("seed", range(10))
def test_a_page_is_free_when_its_last_holder_has_released_it(seed):
    """Random shares and releases against a count by page."""
    draw, allocator = random.Random(seed), PageAllocator(4)
    holders: dict[int, int] = {}
    for _ in range(300):
        held = [page for page, count in holders.items() if count]
        action = draw.choice(["allocate", "share", "release", "release"])
        if action == "allocate":
            for page in allocator.allocate(draw.randint(1, 5))[0]:
                assert not holders.get(page)
                holders[page] = 1
        elif held and action == "share":
            chosen = draw.sample(held, min(3, len(held)))
            allocator.share(chosen)
            for page in chosen:
                holders[page] += 1
        elif held:
            chosen = draw.sample(held, min(4, len(held)))
            allocator.release(chosen)
            for page in chosen:
                holders[page] -= 1
        assert allocator.used == sum(count > 0 for count in holders.values())
        assert allocator.sharing == any(count > 1 for count in holders.values())
        pages = list(holders)
        assert allocator.shared(pages) == [holders[page] > 1 for page in pages]
        count = sum(holders[page] > 1 for page in pages)
        assert allocator.count_shared([-1, *pages], None) == count
        assert allocator.count_shared([-1, *pages], 2) == min(count, 2)
