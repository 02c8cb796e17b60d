"""Pages move between KV lists and the free list on the device; the host does not wait.

A KV list has a number n among all lists of a cache: its table is row n of the page tables.

Shape letters: n KV lists of a cache, k of which are changed, p pages of a full KV list.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.paged import LIST_FULL, OUT_OF_PAGES, FreePages

_OUT_OF_PAGES, _LIST_FULL = tl.constexpr(OUT_OF_PAGES), tl.constexpr(LIST_FULL)
_BLOCK = 128


@triton.jit
def _claim_kernel(
    table_ptr,
    before_ptr,
    after_ptr,
    lists_ptr,
    numbers_ptr,
    count_ptr,
    fault_ptr,
    places,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kv_list = tl.load(lists_ptr + tl.program_id(0)).to(tl.int64)
    have = tl.cdiv(tl.load(before_ptr + kv_list), PAGE)
    need = tl.cdiv(tl.load(after_ptr + tl.program_id(0)), PAGE)
    missing = need - have
    if missing > 0:
        left = tl.atomic_add(count_ptr, -missing) - missing
        if left < 0:
            tl.atomic_or(fault_ptr, _OUT_OF_PAGES)
        if need > places:
            tl.atomic_or(fault_ptr, _LIST_FULL)
        for start in range(0, missing, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = (at < missing) & (left + at >= 0) & (have + at < places)
            page = tl.load(numbers_ptr + left + at, mask=inside, other=0)
            tl.store(table_ptr + kv_list * places + have + at, page, mask=inside)


@triton.jit
def _release_kernel(
    table_ptr,
    lengths_ptr,
    after_ptr,
    lists_ptr,
    numbers_ptr,
    count_ptr,
    holders_ptr,
    places,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kv_list = tl.load(lists_ptr + tl.program_id(0)).to(tl.int64)
    have = tl.cdiv(tl.load(lengths_ptr + kv_list), PAGE)
    after = tl.load(after_ptr + tl.program_id(0))
    need = tl.cdiv(after, PAGE)
    for start in range(need, have, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < have
        page = tl.load(table_ptr + kv_list * places + at, mask=inside, other=0)
        held = tl.atomic_add(holders_ptr + page, -1, mask=inside)
        freed = inside & (held == 1)
        tl.store(holders_ptr + page, 1, mask=freed)  # as a free page has
        each = freed.to(tl.int32)
        first = tl.atomic_add(count_ptr, tl.sum(each, 0))
        tl.store(numbers_ptr + first + tl.cumsum(each, 0) - 1, page, mask=freed)
    tl.debug_barrier()  # every warp has read the length
    tl.store(lengths_ptr + kv_list, after)


def claim(
    table: Tensor, lengths: Tensor, after: Tensor, lists: Tensor, free: FreePages, page_slots: int
) -> None:
    """Give KV lists the pages that they need for more slots.

    Args:
        table: int32 [n, p], page numbers; updated.
        lengths: int32 [n], slots in use; not changed.
        after: int32 [k], slots that are needed.
        lists: int64 [k], numbers of the KV lists, all different.
        free: Where the pages come from; `fault` is set if there are too few.
        page_slots: Slots of a page.
    """
    _claim_kernel[(len(lists),)](
        table,
        lengths,
        after,
        lists,
        free.numbers,
        free.left,
        free.fault,
        table.shape[-1],
        PAGE=page_slots,
        BLOCK=_BLOCK,
        num_warps=1,
    )


def release(
    table: Tensor, lengths: Tensor, after: Tensor, lists: Tensor, free: FreePages, page_slots: int
) -> None:
    """Set the lengths of KV lists and give up the pages behind them.

    A page without another holder is free again.

    Args:
        table: int32 [n, p], page numbers.
        lengths: int32 [n], slots in use; updated.
        after: int32 [k], slots that stay; pages for more of them are already there.
        lists: int64 [k], numbers of the KV lists, all different.
        free: Where the pages go; with `holders`.
        page_slots: Slots of a page.
    """
    _release_kernel[(len(lists),)](
        table,
        lengths,
        after,
        lists,
        free.numbers,
        free.left,
        free.holders,
        table.shape[-1],
        PAGE=page_slots,
        BLOCK=_BLOCK,
        num_warps=1,
    )
