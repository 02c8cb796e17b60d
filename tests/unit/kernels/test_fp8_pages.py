"""Pages of prompts between FP8 and the model's dtype, against plain torch operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.wide_pages import WidePages
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import FP8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
HEADS, PLACES, SLOTS, SIZE = 2, 6, 4, 24
TABLE = torch.tensor([[[7, 3, 9, 1, 0, 0], [2, 8, 4, 0, 0, 0]]], dtype=torch.int32, device=DEVICE)
LENGTHS = torch.tensor([[14, 9]], dtype=torch.int32, device=DEVICE)  # the last pages are not full


def wide_pages(stored):
    sizes = {"head_size": SIZE, "page_slots": SLOTS, "pages": len(stored) - 1}
    pool = DevicePool(dtype=torch.float32, device=DEVICE, stored=FP8, **sizes)
    pool.pages = stored
    return WidePages(pool, heads=HEADS, places=PLACES)


def content():
    """KV lists [1, h, p, 2, s, d] of sizes that differ from page to page, exact in FP8."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-15, 16, (1, HEADS, PLACES, 2, SLOTS, SIZE), generator=draw).float()
    scale = 2.0 ** torch.randint(-20, 20, (1, HEADS, PLACES, 2, 1, 1), generator=draw)
    return (x * scale).to(DEVICE)


def in_use():
    """Return the slots that the lists fill, bool [1, h, p, 1, s, 1]."""
    slot = torch.arange(PLACES * SLOTS, device=DEVICE).view(PLACES, 1, SLOTS, 1)
    return slot < LENGTHS[..., None, None, None, None]


def stored_lists(stored, exponents):
    """Return the values of pages and exponents, [1, h, p, 2, s, d]."""
    return stored[TABLE.long()].float() * exponents.float().exp2()[..., None, None]


def test_what_is_written_is_read_again_and_nothing_else_changes() -> None:
    stored = torch.full((10, 2, SLOTS, SIZE), 7.0, device=DEVICE).to(FP8)
    exponents = torch.zeros(1, HEADS, PLACES, 2, dtype=torch.int8, device=DEVICE)
    wide, expected = wide_pages(stored), content()
    pages = wide.empty(1)
    pages.pages[pages.table.long()] = expected
    wide.write(TABLE, exponents, LENGTHS, None)
    used = in_use()
    found = stored_lists(stored, exponents)
    assert torch.equal(torch.where(used, found, 0), torch.where(used, expected, 0))
    held = used.any(4, keepdim=True)  # slots behind a list, in a page of it
    assert (found[(held & ~used).expand_as(found)] == 0).all()
    assert (stored[[0, 5, 6]].float() == 7).all()
    other = wide_pages(stored)
    pages = other.read(TABLE, exponents, LENGTHS)
    again = pages.pages[pages.table.long()]
    assert torch.equal(torch.where(used, again, 0), torch.where(used, expected, 0))


def test_stored_numbers_leave_one_power_of_two_to_spare() -> None:
    stored = torch.zeros(10, 2, SLOTS, SIZE, device=DEVICE).to(FP8)
    exponents = torch.zeros(1, HEADS, PLACES, 2, dtype=torch.int8, device=DEVICE)
    wide = wide_pages(stored)
    pages = wide.empty(1)
    pages.pages[pages.table.long()] = content()
    wide.write(TABLE, exponents, LENGTHS, None)
    peak = stored[TABLE.long()].float().masked_fill(~in_use(), 0).abs().amax((4, 5))
    full = in_use().any(4)[..., 0] & (peak > 0)
    assert ((peak >= 64) & (peak < 128))[full].all()


def test_pages_that_have_not_changed_are_left_alone() -> None:
    """They may belong to other KV lists as well."""
    stored = torch.full((10, 2, SLOTS, SIZE), 7.0, device=DEVICE).to(FP8)
    exponents = torch.full((1, HEADS, PLACES, 2), 3, dtype=torch.int8, device=DEVICE)
    wide, expected = wide_pages(stored), content()
    pages = wide.empty(1)
    pages.pages[pages.table.long()] = expected
    changed = torch.zeros(1, HEADS, PLACES, dtype=torch.bool, device=DEVICE)
    changed[0, 0, 1] = changed[0, 1, 2] = True
    wide.write(TABLE, exponents, LENGTHS, changed)
    kept = [page for page in range(10) if page not in (3, 4)]
    assert (stored[kept].float() == 7).all()
    assert (exponents[~changed] == 3).all()
    found = stored_lists(stored, exponents)
    written = changed[..., None, None, None] & in_use()
    assert torch.equal(torch.where(written, found, 0), torch.where(written, expected, 0))


def test_short_sequences_share_the_memory_of_a_full_one() -> None:
    wide = wide_pages(torch.zeros(10, 2, SLOTS, SIZE, device=DEVICE).to(FP8))
    assert [wide.sequences(n) for n in (1, 8, 9, 12, 13, 24)] == [6, 3, 2, 2, 1, 1]
    table = wide.empty(3).table
    assert table.shape == (3, HEADS, 2)
    assert len(table.unique()) == table.numel()
