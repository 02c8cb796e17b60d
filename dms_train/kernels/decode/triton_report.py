"""Results of a decode step, written into host memory by one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.launch import can_overlap

_BLOCK = 1024
_PARTS = 5  # at most


@triton.jit
def _copy(source_ptr, begin, count, place, out_ptr):
    """Copy one tensor to its range of the output."""
    if source_ptr is not None:
        inside = (place >= begin) & (place < begin + count)
        value = tl.load(source_ptr + place - begin, mask=inside, other=0)
        tl.store(out_ptr + place, value, mask=inside)


@triton.jit
def _report_kernel(
    ptr_0, ptr_1, ptr_2, ptr_3, ptr_4, count_0, count_1, count_2, count_3, count_4, out_ptr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = 0
    _copy(ptr_0, begin, count_0, place, out_ptr)
    begin += count_0
    _copy(ptr_1, begin, count_1, place, out_ptr)
    begin += count_1
    _copy(ptr_2, begin, count_2, place, out_ptr)
    begin += count_2
    _copy(ptr_3, begin, count_3, place, out_ptr)
    begin += count_3
    _copy(ptr_4, begin, count_4, place, out_ptr)


def report_status(parts: list[Tensor], out: Tensor) -> None:
    """Concatenate tensors in one kernel; see `DecodeKernels.report_status`."""
    missing = _PARTS - len(parts)
    device = parts[0].device
    overlap = can_overlap(device)
    _report_kernel[(triton.cdiv(len(out), _BLOCK),)](
        *parts,
        *[None] * missing,
        *map(len, parts),
        *[0] * missing,
        out,
        BLOCK=_BLOCK,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
