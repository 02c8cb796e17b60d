"""Selection of pages by the lowest and highest keys of each (Quest, arXiv:2406.10774).

One kernel computes the bound of every page for every query head, the other selects the best pages.
The result is a page table for `triton_attention`. It lists the pages read by any head of a query
group, and for each page the heads that read it.

A page here is `multiple` neighbouring pages of the cache; slots are in the order of positions.

Shape letters: n pages of a slab, r cache rows, h KV heads, b sequences, g query heads per KV head,
p pages of a full KV list, d head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.types import PageBudget, PagedCache, PageSelection
from dms_train.kernels.launch import can_overlap

_BLOCK = 64  # pages of a program
_ROWS = 16  # fewest rows of a product on tensor cores
_SCORES = 2**11  # held by four warps


@triton.jit
def _bound_kernel(
    query_ptr, bounds_ptr, table_ptr, length_ptr, rows_ptr, score_ptr, heads, places, columns,
    MULTIPLE: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    batch_list = tl.program_id(0)
    row = tl.load(rows_ptr + batch_list // heads)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    kv_list = (row * heads + batch_list % heads).to(tl.int64)
    size = tl.load(length_ptr + kv_list, mask=row >= 0, other=0)
    pages = tl.cdiv(size, PAGE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * (BLOCK * MULTIPLE) < pages:
        channel = tl.arange(0, D_PAD)
        head = tl.arange(0, R_PAD)
        first = batch_list.to(tl.int64) * R + head
        at = query_ptr + first[:, None] * D + channel[None, :]
        query = tl.load(at, mask=(head < R)[:, None] & (channel < D)[None, :], other=0.0)
        lowest = tl.full([BLOCK, D_PAD], float("inf"), bounds_ptr.dtype.element_ty)
        highest = tl.full([BLOCK, D_PAD], float("-inf"), bounds_ptr.dtype.element_ty)
        for part in tl.static_range(MULTIPLE):
            place = column * MULTIPLE + part
            page = tl.load(table_ptr + kv_list * places + place, mask=place < pages, other=0)
            at = bounds_ptr + (page.to(tl.int64) * (2 * D))[:, None] + channel[None, :]
            inside = (place < pages)[:, None] & (channel < D)[None, :]
            low = tl.load(at, mask=inside, other=float("inf"))
            high = tl.load(at + D, mask=inside, other=float("-inf"))
            lowest, highest = tl.minimum(lowest, low), tl.maximum(highest, high)
        known = (column * MULTIPLE < pages)[:, None] & (channel < D)[None, :]
        lowest, highest = tl.where(known, lowest, 0.0), tl.where(known, highest, 0.0)
        # a positive query channel has its larger product with the highest key
        up, down = tl.maximum(query, 0.0).to(query.dtype), tl.minimum(query, 0.0).to(query.dtype)
        bound = tl.dot(up, tl.trans(highest).to(up.dtype), input_precision="ieee")
        bound = tl.dot(down, tl.trans(lowest).to(up.dtype), bound, input_precision="ieee")
        inside = (head < R)[:, None] & (column * MULTIPLE < pages)[None, :]
        tl.store(score_ptr + first[:, None] * columns + column[None, :], bound, mask=inside)


@triton.jit
def _threshold(ranked, wanted, R: tl.constexpr, R_PAD: tl.constexpr, COLUMNS: tl.constexpr):
    """Find a number that exactly `wanted` columns of a row reach, bit by bit.

    The rows are uint32 [R_PAD, COLUMNS]. If columns are equal, there may be no such number; the
    result is then the `wanted`-th largest.
    """
    least = tl.zeros([R_PAD], tl.uint32)
    bit = tl.full([R_PAD], 2147483648, tl.uint32)
    reaching = tl.where(tl.arange(0, R_PAD) < R, COLUMNS, wanted)
    left = 32
    while (left > 0) & (tl.max(reaching, 0) > wanted):
        higher = least | bit
        count = tl.sum((ranked >= higher[:, None]).to(tl.int32), 1)
        least = tl.where(count >= wanted, higher, least)
        reaching = tl.where(count >= wanted, count, reaching)
        bit = bit >> 1
        left -= 1
    return least


@triton.jit
def _select_kernel(
    score_ptr, table_ptr, length_ptr, rows_ptr, count_ptr, out_table_ptr, out_heads_ptr,
    out_length_ptr, read_ptr, heads, places, columns,
    MULTIPLE: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    batch_list = tl.program_id(0)
    row = tl.load(rows_ptr + batch_list // heads)
    wanted = tl.load(count_ptr + batch_list // heads)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    kv_list = (row * heads + batch_list % heads).to(tl.int64)
    size = tl.load(length_ptr + kv_list, mask=row >= 0, other=0)
    pages = tl.cdiv(size, PAGE)
    count = tl.cdiv(size, PAGE * MULTIPLE)
    wanted = tl.minimum(wanted, count).to(tl.int32)
    head, column = tl.arange(0, R_PAD)[:, None], tl.arange(0, COLUMNS)[None, :]
    real = (head < R) & (column < count)
    first = batch_list.to(tl.int64) * R
    score = tl.load(score_ptr + (first + head) * columns + column, mask=real, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    ranked = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    if LAST:
        ranked = tl.where(column == count - 1, 4294967295, ranked)
    ranked = tl.where(real, ranked, 0)
    least = _threshold(ranked, wanted, R, R_PAD, COLUMNS)[:, None]
    above = (ranked > least) & real
    equal = (ranked == least) & real
    free = wanted - tl.sum(above.to(tl.int32), 1)[:, None]
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= free))  # lower pages first
    members = tl.sum(tl.where(chosen, 1 << head, 0), 0)
    column = tl.arange(0, COLUMNS)
    read = members != 0
    order = tl.cumsum(read.to(tl.int32), 0) - 1
    slots = tl.minimum(size - column * (PAGE * MULTIPLE), PAGE * MULTIPLE)
    total = tl.sum(tl.where(read, slots, 0), 0)
    out = batch_list.to(tl.int64) * places
    for part in tl.static_range(MULTIPLE):
        place = column * MULTIPLE + part
        inside = read & (place < pages)
        page = tl.load(table_ptr + kv_list * places + place, mask=inside, other=0)
        tl.store(out_table_ptr + out + order * MULTIPLE + part, page, mask=inside)
        tl.store(out_heads_ptr + out + order * MULTIPLE + part, members, mask=inside)
    tl.store(out_length_ptr + batch_list, total)
    tl.store(read_ptr + kv_list, total, mask=row >= 0)


def select_pages(
    query: Tensor,
    cache: PagedCache,
    bounds: Tensor,
    rows: Tensor,
    wanted: PageBudget,
    memory: PageSelection,
    read: Tensor,
) -> None:
    """Select the pages to read, in two kernels; see `DecodeKernels.select_pages`."""
    b, all_heads, d = query.shape
    h, table_width = cache.table.shape[1:]
    group, columns = all_heads // h, memory.scores.shape[-1]
    overlap = can_overlap(query.device)
    _bound_kernel[(b * h, triton.cdiv(columns, _BLOCK))](
        query,
        bounds,
        cache.table,
        cache.lengths,
        rows,
        memory.scores,
        h,
        table_width,
        columns,
        MULTIPLE=wanted.multiple,
        PAGE=cache.page_slots,
        R=group,
        R_PAD=max(_ROWS, triton.next_power_of_2(group)),
        D=d,
        D_PAD=max(_ROWS, triton.next_power_of_2(d)),
        BLOCK=_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    padded, wide = triton.next_power_of_2(group), max(16, triton.next_power_of_2(columns))
    _select_kernel[(b * h,)](
        memory.scores,
        cache.table,
        cache.lengths,
        rows,
        wanted.pages,
        memory.table,
        memory.heads,
        memory.lengths,
        read,
        h,
        table_width,
        columns,
        MULTIPLE=wanted.multiple,
        PAGE=cache.page_slots,
        LAST=wanted.last,
        R=group,
        R_PAD=padded,
        COLUMNS=wide,
        OVERLAP=overlap,
        num_warps=max(4, min(16, padded * wide // _SCORES)),
        launch_pdl=overlap,
    )
