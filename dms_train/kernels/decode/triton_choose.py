"""Choice of the token that each KV list evicts after a decode step.

The ring entry of a KV list holds the slot of this token; the next token is stored there
(`types.CHOSEN`). One program handles one KV list, or one sequence if all KV heads decide together.
`reference.choose` is the same in plain loops.

Shape letters: r cache rows, h KV heads, b sequences, g query heads per KV head, s slots of a full
KV list.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.decode.types import (
    DECAYED,
    LEAST,
    MAXIMUM,
    MEAN,
    OLDEST,
    SUMMED,
    Choice,
    PagedCache,
    SlotLogits,
)
from dms_train.kernels.launch import can_overlap

_OLDEST, _SUMMED, _DECAYED = tl.constexpr(OLDEST), tl.constexpr(SUMMED), tl.constexpr(DECAYED)
_MAXIMUM, _MEAN = tl.constexpr(MAXIMUM), tl.constexpr(MEAN)
_SCORES = 2**13  # scores that a program holds at a time


@triton.jit
def _received(
    logit_ptr, logit_slots, total, slot, inside,
    MEMBERS: tl.constexpr, M_PAD: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Return the attention that slots received from some query heads, reduced over the heads."""
    member = tl.arange(0, M_PAD)[:, None]
    at = logit_ptr + member.to(tl.int64) * logit_slots + slot[None, :]
    logit = tl.load(at, mask=(member < MEMBERS) & inside[None, :], other=float("-inf"))
    weight = tl.exp2(logit - total[:, None])
    if REDUCE == _MAXIMUM:
        return tl.max(weight, 0)
    score = tl.sum(weight, 0)
    return score / MEMBERS if REDUCE == _MEAN else score


@triton.jit
def _choose_kernel(
    position_ptr, length_ptr, ring_ptr, score_ptr, logit_ptr, total_ptr, rows_ptr, time_ptr,
    limit_ptr, recent_ptr, brought_ptr, heads, slots, logit_slots,
    KIND: tl.constexpr, REDUCE: tl.constexpr, TOGETHER: tl.constexpr, H_PAD: tl.constexpr,
    R: tl.constexpr, M_PAD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    batch, head = tl.program_id(0), tl.program_id(1) * TOGETHER
    row, time = tl.load(rows_ptr + batch), tl.load(time_ptr + batch)
    limit, recent = tl.load(limit_ptr + batch), tl.load(recent_ptr + batch)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    kv_list = (row * heads + head).to(tl.int64)
    size = tl.load(length_ptr + kv_list)
    within, member = tl.arange(0, BLOCK), tl.arange(0, M_PAD)
    first = (batch * heads + head).to(tl.int64) * R
    if KIND == _DECAYED:
        brought = tl.load(brought_ptr + batch * heads + head)
    elif KIND != _OLDEST:
        total = tl.load(total_ptr + first + member, mask=member < TOGETHER * R, other=0.0)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    chosen = tl.full([BLOCK], -1, tl.int32)
    places = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, size, BLOCK):
        slot = start + within
        inside = slot < size
        position = tl.load(position_ptr + kv_list * slots + slot, mask=inside, other=-1)
        if KIND == _OLDEST:
            score = position.to(tl.float32)
            free = inside & (position >= limit) & (position <= time + 1 - recent)
        elif KIND == _DECAYED:
            score_at = score_ptr + kv_list * slots + slot
            known = tl.load(score_at, mask=inside & (position != time), other=0.0)
            known = tl.where(position == time, brought, known)
            tl.store(score_at, known, mask=inside & (position == time))
            score = (time - position).to(tl.float32) * known
            free = inside & (position <= time - recent)
        else:
            score = _received(
                logit_ptr + first * logit_slots, logit_slots, total, slot, inside,
                TOGETHER * R, M_PAD, REDUCE,
            )  # fmt: skip
            free = inside & (position <= time - recent)
        if KIND == _SUMMED:
            score_at = score_ptr + kv_list * slots + slot
            score += tl.load(score_at, mask=inside & (position != time), other=0.0)
            tl.store(score_at, score, mask=inside)
        lower = free & ((score < least) | ((score == least) & (position > chosen)))
        least = tl.where(lower, score, least)
        chosen = tl.where(lower, position, chosen)
        places = tl.where(lower, slot, places)
    lowest = tl.min(least, 0)
    position = tl.max(tl.where(least == lowest, chosen, -1), 0)
    slot = tl.max(tl.where((least == lowest) & (chosen == position), places, 0), 0)
    evicts = position >= 0
    if KIND != _OLDEST:
        evicts = evicts & (size > limit)
    each = tl.arange(0, H_PAD)
    entry = tl.where(evicts, 2 * slot + 1, 0) + tl.zeros([H_PAD], tl.int32)
    tl.store(ring_ptr + kv_list + each, entry, mask=each < TOGETHER)


def choose(
    cache: PagedCache,
    choice: Choice,
    rows: Tensor,
    time: Tensor,
    *,
    logits: SlotLogits | None = None,
    scores: Tensor | None = None,
    brought: Tensor | None = None,
) -> None:
    """Mark the token that each KV list evicts; see `DecodeKernels.choose`."""
    assert cache.positions is not None
    h = cache.lengths.shape[1]
    group = 1 if logits is None else logits.logits.shape[1]
    together = h if choice.together else 1
    members = triton.next_power_of_2(together * group) if choice.kind in (SUMMED, LEAST) else 1
    overlap = can_overlap(cache.lengths.device)
    _choose_kernel[(len(rows), h // together)](
        cache.positions,
        cache.lengths,
        cache.ring,
        scores,
        None if logits is None else logits.logits,
        None if logits is None else logits.totals,
        rows,
        time,
        choice.limit,
        choice.recent,
        brought,
        h,
        cache.positions.shape[-1],
        0 if logits is None else logits.logits.shape[-1],
        KIND=choice.kind,
        REDUCE=choice.reduce,
        TOGETHER=together,
        H_PAD=triton.next_power_of_2(together),
        R=group,
        M_PAD=members,
        BLOCK=max(16, min(1024, _SCORES // members)),
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
