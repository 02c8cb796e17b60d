"""Kernels that move pages between KV lists and the free list; the host does not wait.

The KV lists of a cache are numbered: the table of list n is row n of the page tables.

Shape letters: n KV lists of a cache, k of which are changed, p pages of a full KV list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.types import LIST_FULL, OUT_OF_PAGES, FreePages

_OUT_OF_PAGES, _LIST_FULL = tl.constexpr(OUT_OF_PAGES), tl.constexpr(LIST_FULL)
_BLOCK = 128
_NEIGHBOURS = 16  # pages of a program that copies
_COPIED = 512  # numbers of a page that are copied at a time


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
        tl.store(holders_ptr + page, 1, mask=freed)  # as in a free page
        each = freed.to(tl.int32)
        first = tl.atomic_add(count_ptr, tl.sum(each, 0))
        tl.store(numbers_ptr + first + tl.cumsum(each, 0) - 1, page, mask=freed)
    tl.debug_barrier()  # every warp has read the length
    tl.store(lengths_ptr + kv_list, after)


@triton.jit
def own_page(
    table_ptr,
    pages_ptr,
    numbers_ptr,
    count_ptr,
    fault_ptr,
    holders_ptr,
    place,
    page,
    held,
    stored,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a page that only this KV list holds: the page or a copy, and whether it exists.

    `held` is the number of holders. Each holder releases the page after its copy, so that the last
    one may write at once.
    """
    if held > 1:
        left = tl.atomic_add(count_ptr, -1) - 1
        stored = left >= 0
        copy = tl.load(numbers_ptr + left, mask=stored, other=0)
        from_ptr, to_ptr = (
            pages_ptr + page.to(tl.int64) * SIZE,
            pages_ptr + copy.to(tl.int64) * SIZE,
        )
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = (at < SIZE) & stored
            tl.store(to_ptr + at, tl.load(from_ptr + at, mask=inside), mask=inside)
        tl.debug_barrier()  # every warp has copied its part
        if stored:
            tl.atomic_add(holders_ptr + page, -1)
            tl.store(table_ptr + place, copy)
        else:
            tl.atomic_or(fault_ptr, _OUT_OF_PAGES)
        page = copy
    return page, stored


@triton.jit
def _own_kernel(
    table_ptr,
    lengths_ptr,
    changed_ptr,
    lists_ptr,
    pages_ptr,
    numbers_ptr,
    count_ptr,
    fault_ptr,
    holders_ptr,
    places,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Copy the shared pages among some neighbouring pages of a KV list.

    A program is one warp: others release pages meanwhile, and warps could see different holders.
    """
    kv_list = tl.load(lists_ptr + tl.program_id(0)).to(tl.int64)
    have = tl.minimum(tl.cdiv(tl.load(lengths_ptr + kv_list), PAGE), places)
    list_ptr = table_ptr + kv_list * places
    changed_ptr += tl.program_id(0).to(tl.int64) * places
    first = tl.program_id(1) * PLACES
    at = first + tl.arange(0, PLACES)
    changes = tl.load(changed_ptr + at, mask=at < have, other=0) != 0
    pages = tl.load(list_ptr + at, mask=changes, other=0)
    holders = tl.load(holders_ptr + pages, mask=changes, other=1)
    if tl.max(holders, 0) > 1:
        for place in range(first, tl.minimum(first + PLACES, have)):
            if tl.load(changed_ptr + place) != 0:
                page = tl.load(list_ptr + place)
                own_page(
                    list_ptr, pages_ptr, numbers_ptr, count_ptr, fault_ptr, holders_ptr, place,
                    page, tl.load(holders_ptr + page), place < places, SIZE, COPIED,
                )  # fmt: skip


def allocate_pages(
    table: Tensor, lengths: Tensor, after: Tensor, lists: Tensor, free: FreePages, page_slots: int
) -> None:
    """Pop pages for KV lists; see `DecodeKernels.allocate_pages`."""
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


def release_pages(
    table: Tensor, lengths: Tensor, after: Tensor, lists: Tensor, free: FreePages, page_slots: int
) -> None:
    """Push pages of KV lists; see `DecodeKernels.release_pages`."""
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


def copy_shared_pages(
    table: Tensor, lengths: Tensor, changed: Tensor, lists: Tensor, pages: Tensor, free: FreePages
) -> None:
    """Copy shared pages before they change; see `DecodeKernels.copy_shared_pages`."""
    table_width = table.shape[-1]
    _own_kernel[(len(lists), triton.cdiv(table_width, _NEIGHBOURS))](
        table,
        lengths,
        changed.contiguous().view(torch.uint8),
        lists,
        pages,
        free.numbers,
        free.left,
        free.fault,
        free.holders,
        table_width,
        PAGE=pages.shape[2],
        SIZE=pages[0].numel(),
        PLACES=_NEIGHBOURS,
        COPIED=_COPIED,
        num_warps=1,
    )
