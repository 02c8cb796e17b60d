"""Copies of KV lists between FP8 pages and pages in the dtype of prompts.

FP8 pages follow `kernels.decode.types`: a power of two scales the keys of a page below 256, and
another one its values. One power is to spare, so that a later token seldom raises it.

Shape letters: k KV lists, p pages of a full KV list, s slots, d head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 64  # most programs of a KV list


@triton.jit
def _read_kernel(
    pages_ptr,
    table_ptr,
    exponent_ptr,
    length_ptr,
    wide_ptr,
    places,
    wide_places,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    kv_list = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + kv_list)
    slot, channel = tl.arange(0, PAGE)[:, None], tl.arange(0, D_PAD)[None, :]
    for place in range(tl.program_id(0), tl.cdiv(length, PAGE), tl.num_programs(0)):
        page = tl.load(table_ptr + kv_list * places + place).to(tl.int64)
        inside = (place * PAGE + slot < length) & (channel < D)
        for half in tl.static_range(2):
            exponent = tl.load(exponent_ptr + (kv_list * places + place) * 2 + half)
            within = half * PAGE * D + slot * D + channel
            stored = tl.load(pages_ptr + page * (2 * PAGE * D) + within, mask=inside, other=0.0)
            wide = stored.to(tl.float32) * tl.exp2(exponent.to(tl.float32))
            to_ptr = wide_ptr + (kv_list * wide_places + place) * (2 * PAGE * D) + within
            tl.store(to_ptr, wide.to(wide_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_kernel(
    wide_ptr,
    pages_ptr,
    table_ptr,
    exponent_ptr,
    length_ptr,
    changed_ptr,
    places,
    wide_places,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    kv_list = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + kv_list)
    slot, channel = tl.arange(0, PAGE)[:, None], tl.arange(0, D_PAD)[None, :]
    for place in range(tl.program_id(0), tl.cdiv(length, PAGE), tl.num_programs(0)):
        changed = True
        if changed_ptr is not None:
            changed = tl.load(changed_ptr + kv_list * places + place) != 0
        if changed:
            page = tl.load(table_ptr + kv_list * places + place).to(tl.int64)
            inside = (place * PAGE + slot < length) & (channel < D)
            for half in tl.static_range(2):
                within = half * PAGE * D + slot * D + channel
                from_ptr = wide_ptr + (kv_list * wide_places + place) * (2 * PAGE * D) + within
                wide = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
                peak = tl.max(tl.max(tl.abs(wide), 1), 0)
                exponent = (peak.to(tl.int32, bitcast=True) >> 23) - 133  # 127 + 7 - 1 to spare
                exponent = tl.minimum(tl.maximum(exponent, -99), 101)
                stored = wide * tl.exp2(-exponent.to(tl.float32))
                to_ptr = pages_ptr + page * (2 * PAGE * D) + within
                tl.store(to_ptr, stored.to(pages_ptr.dtype.element_ty), mask=channel < D)
                exponent_at = exponent_ptr + (kv_list * places + place) * 2 + half
                tl.store(exponent_at, exponent.to(tl.int8))


def read_fp8_pages(
    pages: Tensor, table: Tensor, exponents: Tensor, lengths: Tensor, wide: Tensor
) -> None:
    """Copy KV lists out of FP8 pages; see `PrefillKernels.read_fp8_pages`."""
    k, table_width = table.shape
    _, wide_places, _, slots, d = wide.shape
    _read_kernel[(min(table_width, _PROGRAMS), k)](
        pages, table, exponents, lengths, wide, table_width, wide_places,
        PAGE=slots, D=d, D_PAD=triton.next_power_of_2(d),
    )  # fmt: skip


def write_fp8_pages(
    wide: Tensor,
    pages: Tensor,
    table: Tensor,
    exponents: Tensor,
    lengths: Tensor,
    changed: Tensor | None,
) -> None:
    """Store KV lists in FP8 pages; see `PrefillKernels.write_fp8_pages`."""
    k, table_width = table.shape
    _, wide_places, _, slots, d = wide.shape
    _write_kernel[(min(table_width, _PROGRAMS), k)](
        wide, pages, table, exponents, lengths, changed, table_width, wide_places,
        PAGE=slots, D=d, D_PAD=triton.next_power_of_2(d),
    )  # fmt: skip
