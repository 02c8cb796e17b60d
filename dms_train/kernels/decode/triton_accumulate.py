"""DMC for one new token per sequence: decision, importance and merge in one kernel.

The result is a step for `triton_append`. Its eviction channels are cleared, and key and value
belong to the merged state. Its signal tells whether this state overwrites the previous token's.
`method.dmc.merge` is the same in torch operations.

Shape letters: r cache rows, h KV heads, b sequences, g query heads per KV head, m tokens that a
state averages besides the newest, d head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dms_train.kernels.decode.triton_append import _normed_key, _normed_query, _query_halves
from dms_train.kernels.decode.types import HeadNorms, MergeRule, NewestTokens, Step
from dms_train.kernels.launch import can_overlap


@triton.jit
def _at_channel(first, second, half, CHANNEL: tl.constexpr, HALF: tl.constexpr):
    """Return the eviction channel of heads in two halves of their channels, [any, D_PAD / 2]."""
    side = first if CHANNEL < HALF else second
    at = CHANNEL if CHANNEL < HALF else CHANNEL - HALF
    return tl.sum(tl.where(half[None, :] == at, side, 0.0), 1)


@triton.jit
def _accumulate_kernel(
    query_ptr, key_ptr, value_ptr, position_ptr, rows_ptr, newest_key_ptr, newest_value_ptr,
    newest_weight_ptr, out_query_ptr, out_key_ptr, out_value_ptr, out_signal_ptr, query_norm_ptr,
    key_norm_ptr, epsilon, query_stride, key_stride, value_stride, scale, offset,
    importance_offset, smallest,
    CHANNEL: tl.constexpr, UNIFORM: tl.constexpr, KEPT: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + batch)
    if row < 0:
        return
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, D_PAD // 2)
    inside = half < HALF
    time = tl.load(position_ptr + batch)
    key_at = key_ptr + batch.to(tl.int64) * key_stride + head * D + half
    key_1 = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
    key_2 = tl.load(key_at + HALF, mask=inside, other=0.0).to(tl.float32)
    value_at = value_ptr + batch.to(tl.int64) * value_stride + head * D + half
    value_1 = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)
    value_2 = tl.load(value_at + HALF, mask=inside, other=0.0).to(tl.float32)
    query_at = query_ptr + batch.to(tl.int64) * query_stride + head * R * D
    first, second = _query_halves(query_at, half, R, R_PAD, D)
    if query_norm_ptr is not None:
        first, second = _normed_query(first, second, query_norm_ptr, epsilon, half, D)
        key_1, key_2 = _normed_key(key_1, key_2, key_norm_ptr, epsilon, half, D)
    deciding = tl.sum(_at_channel(key_1[None, :], key_2[None, :], half, CHANNEL, HALF), 0)
    merges = (deciding * scale - offset > 0) & (time > 0)
    weight = 1.0
    if not UNIFORM:
        weighing = tl.sum(_at_channel(first, second, half, CHANNEL, HALF), 0) / R
        weight = tl.sigmoid(weighing + importance_offset) + smallest
    key_1 = tl.where(half == CHANNEL, 0.0, key_1)
    key_2 = tl.where(half + HALF == CHANNEL, 0.0, key_2)
    first = tl.where(half[None, :] == CHANNEL, 0.0, first)
    second = tl.where(half[None, :] + HALF == CHANNEL, 0.0, second)
    entries = (row * heads + head).to(tl.int64) * KEPT
    sum_key_1, sum_key_2 = key_1 * weight, key_2 * weight
    sum_value_1, sum_value_2 = value_1 * weight, value_2 * weight
    total, share = weight, merges.to(tl.float32)
    for m in range(1, KEPT + 1):
        there = time >= m
        entry = entries + (time + KEPT - m) % KEPT
        part = share * tl.load(newest_weight_ptr + entry * 2 + 1, mask=there, other=0.0)
        used = tl.where(inside, part, 0.0) > 0.0  # only tokens that are in the state
        old_key = newest_key_ptr + entry * D + half
        old_value = newest_value_ptr + entry * D + half
        sum_key_1 += part * tl.load(old_key, mask=used, other=0.0).to(tl.float32)
        sum_key_2 += part * tl.load(old_key + HALF, mask=used, other=0.0).to(tl.float32)
        sum_value_1 += part * tl.load(old_value, mask=used, other=0.0).to(tl.float32)
        sum_value_2 += part * tl.load(old_value + HALF, mask=used, other=0.0).to(tl.float32)
        total += part
        share *= tl.load(newest_weight_ptr + entry * 2, mask=there, other=0.0)
    tl.debug_barrier()  # the oldest entry has been read
    kind = out_key_ptr.dtype.element_ty
    entry = entries + time % KEPT
    tl.store(newest_weight_ptr + entry * 2, merges.to(tl.float32))
    tl.store(newest_weight_ptr + entry * 2 + 1, weight)
    new_key, new_value = newest_key_ptr + entry * D + half, newest_value_ptr + entry * D + half
    tl.store(new_key, key_1.to(kind), mask=inside)
    tl.store(new_key + HALF, key_2.to(kind), mask=inside)
    tl.store(new_value, value_1.to(kind), mask=inside)
    tl.store(new_value + HALF, value_2.to(kind), mask=inside)
    kv_list = (batch * heads + head).to(tl.int64)
    out_key, out_value = out_key_ptr + kv_list * D + half, out_value_ptr + kv_list * D + half
    tl.store(out_key, (sum_key_1 / total).to(kind), mask=inside)
    tl.store(out_key + HALF, (sum_key_2 / total).to(kind), mask=inside)
    tl.store(out_value, (sum_value_1 / total).to(kind), mask=inside)
    tl.store(out_value + HALF, (sum_value_2 / total).to(kind), mask=inside)
    tl.store(out_signal_ptr + kv_list, merges.to(tl.int8))
    member = tl.arange(0, R_PAD)[:, None]
    real = (member < R) & inside[None, :]
    out_query = out_query_ptr + kv_list * R * D + member * D + half[None, :]
    tl.store(out_query, first.to(kind), mask=real)
    tl.store(out_query + HALF, second.to(kind), mask=real)


def accumulate(
    step: Step, newest: NewestTokens, merging: MergeRule, norms: HeadNorms | None = None
) -> Step:
    """Merge one token per sequence in one kernel; see `DecodeKernels.accumulate`."""
    b, heads, d = step.query.shape
    h = step.key.shape[1]
    query, key, value = (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (step.query, step.key, step.value)
    )
    signal = torch.empty(b, h, dtype=torch.int8, device=key.device)
    overlap = can_overlap(key.device)
    _accumulate_kernel[(b, h)](
        step.query,
        step.key,
        step.value,
        step.position,
        step.rows,
        newest.key,
        newest.value,
        newest.weights,
        query,
        key,
        value,
        signal,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        step.query.stride(0),
        step.key.stride(0),
        step.value.stride(0),
        merging.scale,
        merging.offset,
        merging.importance_offset,
        merging.smallest,
        CHANNEL=merging.channel,
        UNIFORM=merging.uniform,
        KEPT=newest.key.shape[2],
        R=heads // h,
        R_PAD=triton.next_power_of_2(heads // h),
        D=d,
        D_PAD=triton.next_power_of_2(d),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return step._replace(query=query, key=key, value=value, signal=signal)
