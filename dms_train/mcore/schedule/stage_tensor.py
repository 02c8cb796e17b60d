"""State exchanged by pipeline stages, packed into the one tensor that the schedules support.

    [student s rows | teacher s rows (if any) | 1 row of eviction statistics]
    each row [b, hidden]

s are the positions of this rank: S / (tp cp) of S with sequence parallelism. The row of eviction
statistics holds the columns of `EvictionStats`: per-sample sums over the heads of this rank. They
stay exact fp32 values in any dtype of the stage tensor. Their gradients flow back through the same
row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.mcore.options import EXACT_PARTS
from dms_train.method.eviction_stats import EVICTION_STATS


class StageState(NamedTuple):
    """Hidden states [s, b, h] of student and teacher, eviction statistics [b, EVICTION_STATS]."""

    student: Tensor
    teacher: Tensor | None
    eviction_stats: Tensor


def _split(x: Tensor, dtype: torch.dtype) -> Tensor:
    addends, rest = [], x
    for _ in range(EXACT_PARTS):
        addend = rest.to(dtype)
        addends.append(addend)
        rest = rest - addend.to(x.dtype)
    return torch.cat(addends, dim=-1)


def _merge(addends: Tensor) -> Tensor:
    return addends.float().unflatten(-1, (EXACT_PARTS, -1)).sum(-2)


class _Split(torch.autograd.Function):
    """Split fp32 [b, n] into [b, EXACT_PARTS * n] that adds up exactly; merge gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _split(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # `_Merge.backward` sends an exact split of the gradient, so merging it is the adjoint
        return _merge(grad), None


class _Merge(torch.autograd.Function):
    """Inverse of `_Split`; its gradient is itself sent back as an exact split."""

    @staticmethod
    def forward(ctx: Any, addends: Tensor) -> Tensor:
        ctx.dtype = addends.dtype
        return _merge(addends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _split(grad, ctx.dtype)


def pack(state: StageState) -> Tensor:
    """Pack a stage state into one stage tensor."""
    row = _Split.apply(state.eviction_stats, state.student.dtype)
    row = F.pad(row, (0, state.student.shape[-1] - row.shape[-1]))[None]
    stacked_rows = [state.student, *([] if state.teacher is None else [state.teacher]), row]
    return torch.cat(stacked_rows)


def unpack(tensor: Tensor, *, has_teacher: bool) -> StageState:
    """Invert `pack`."""
    rows = (tensor.shape[0] - 1) // (2 if has_teacher else 1)
    teacher = tensor[rows : 2 * rows].detach() if has_teacher else None
    eviction_stats = _Merge.apply(tensor[-1, :, : EXACT_PARTS * EVICTION_STATS])
    return StageState(tensor[:rows], teacher, eviction_stats)


def stage_seq_length(seq_length: int, *, has_teacher: bool, sequence_shards: int) -> int:
    """Return the `seq_length` for the schedules, which divide it by the sequence shards."""
    return seq_length * (2 if has_teacher else 1) + sequence_shards
