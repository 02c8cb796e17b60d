"""Pages that kernels claim and release, against a list of free pages in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import LIST_FULL, OUT_OF_PAGES, FreePages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if not dispatch.is_supported(DEVICE):
    pytest.skip("needs triton", allow_module_level=True)

SLOTS, LISTS, PLACES, PAGES = 4, 6, 300, 700


def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_lists_grow_and_shrink_and_no_page_is_lost() -> None:
    """A page that two lists hold is free when both have released it."""
    draw, kernels = random.Random(0), dispatch.triton_kernels()
    free = FreePages.all_of(PAGES, DEVICE)
    table = torch.zeros(LISTS, PLACES, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(LISTS, dtype=torch.int32, device=DEVICE)
    for _ in range(12):
        some = draw.sample(range(LISTS), 3)
        after = [draw.choice((0, 3, 4, 50, 700)) for _ in some]
        lists = tensor(some, torch.int64)
        held = lengths.tolist()
        kernels.allocate_pages(table, lengths, tensor(after), lists, free, SLOTS)
        assert lengths.tolist() == held
        kernels.release_pages(table, lengths, tensor(after), lists, free, SLOTS)
        assert lengths[lists].tolist() == after
        used = [
            table[i, : -(-length // SLOTS)].tolist() for i, length in enumerate(lengths.tolist())
        ]
        rest = free.numbers[: int(free.left)].tolist()
        assert sorted(sum(used, rest)) == list(range(1, PAGES + 1))
    assert int(free.fault) == 0
    assert free.holders.eq(1).all()


def test_a_shared_page_is_released_by_its_last_holder() -> None:
    kernels, free = dispatch.triton_kernels(), FreePages.all_of(10, DEVICE)
    table = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    lengths = tensor([0, 0])
    kernels.allocate_pages(table, lengths, tensor([9]), tensor([0], torch.int64), free, SLOTS)
    table[1], lengths[:] = table[0], 9
    free.holders[table[0, :3]] = 2
    nothing = tensor([0])
    kernels.release_pages(table, lengths, nothing, tensor([0], torch.int64), free, SLOTS)
    assert int(free.left) == 7
    kernels.release_pages(table, lengths, tensor([5]), tensor([1], torch.int64), free, SLOTS)
    assert int(free.left) == 8
    kernels.release_pages(table, lengths, nothing, tensor([1], torch.int64), free, SLOTS)
    assert sorted(free.numbers[:10].tolist()) == list(range(1, 11))
    assert free.holders.eq(1).all()


@pytest.mark.parametrize(("slots", "fault"), [(44, OUT_OF_PAGES), (SLOTS * 9, LIST_FULL)])
def test_what_does_not_fit_is_noted(slots: int, fault: int) -> None:
    free = FreePages.all_of(10, DEVICE)
    places = 20 if fault == OUT_OF_PAGES else 8
    table = torch.zeros(1, places, dtype=torch.int32, device=DEVICE)
    lists = tensor([0], torch.int64)
    dispatch.triton_kernels().allocate_pages(
        table, tensor([0]), tensor([slots]), lists, free, SLOTS
    )
    assert int(free.fault) == fault
