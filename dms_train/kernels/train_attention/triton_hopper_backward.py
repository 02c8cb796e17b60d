"""Backward pass for Hopper: the algorithm of `triton_backward`, scheduled by hand.

One warp fetches queries and their output gradients with bulk copies; eight warps own a tile of
keys. The scores of the next tile are computed while the query gradients of the current tile are
added to memory. The products of weights and output gradients run beside the exponentials.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dms_train.kernels.train_attention.triton_hopper_forward import barrier, place_of, tile_layout


@gluon.jit
def _fetch(descs, buffers, bars, place, walk, BLOCK_M: gl.constexpr):
    """Copy keys and values once, then queries, output gradients and row numbers of every step."""
    q_desc, k_desc, v_desc, d_o_desc, lse_desc, delta_desc = descs
    q_s, d_o_s, k_s, v_s, ds_s, lse_s, delta_s = buffers
    kv_full, q_full, d_o_full, empty = bars
    sample, kv_head, first_head, first, row_start, padded = place
    begin, end, n_steps, old, open_to = walk
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [sample, kv_head, first, 0], kv_full, k_s)
    tma.async_copy_global_to_shared(v_desc, [sample, kv_head, first, 0], kv_full, v_s)
    head, query, stage, phase = first_head, begin, 0, 1
    row = row_start + begin
    for _ in range(n_steps):
        mbarrier.wait(empty.index(stage), phase)
        at = [sample, head, query, 0]
        full = q_full.index(stage)
        mbarrier.expect(full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, at, full, q_s.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [row], full, lse_s.index(stage))
        full = d_o_full.index(stage)
        mbarrier.expect(full, d_o_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(d_o_desc, at, full, d_o_s.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], full, delta_s.index(stage))
        query, row, stage = query + BLOCK_M, row + BLOCK_M, stage + 1
        if stage == q_s.type.shape[0]:
            stage, phase = 0, phase ^ 1
        if query >= end:
            head, query, row = head + 1, begin, row + padded - (query - begin)


@gluon.jit
def _weights(scores, vectors, row_lse, query, masked, factor, window, PACKED: gl.constexpr):
    """Compute the softmax weights of a tile [keys, queries]."""
    keys, key_end, bias = vectors
    layout: gl.constexpr = scores.type.layout
    if masked:
        rows = query + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        distance = rows[None, :] - keys[:, None]
        tile = scores * factor + gl.where(distance > window, bias[:, None], 0.0)
        weights = gl.exp2(tile - row_lse[None, :])
        weights = gl.where(distance >= 0, weights, 0.0)
        if PACKED:
            weights = gl.where(rows[None, :] < key_end[:, None], weights, 0.0)
    else:
        weights = gl.exp2(scores * factor + bias[:, None] - row_lse[None, :])
    return weights


@gluon.jit
def _bias_gradient(d_bias, ds, keys, query, masked, window):
    """Add the row sums of ds over the queries whose window a key has left."""
    layout: gl.constexpr = ds.type.layout
    if masked:
        rows = query + gl.arange(0, ds.shape[1], layout=gl.SliceLayout(0, layout))
        late = rows[None, :] - keys[:, None] > window
        d_bias += gl.sum(gl.where(late, ds, 0.0), 1)
    else:
        d_bias += gl.sum(ds, 1)
    return d_bias


@gluon.jit
def _gradients(outputs, buffers, bars, place, walk, vectors, numbers, sizes: gl.constexpr):
    """Compute the gradients of one tile of keys, values and biases; add to the query gradients."""
    dq_base, dk, dv, d_log_keep, dk_strides, out_start = outputs
    q_s, d_o_s, k_s, v_s, ds_s, lse_s, delta_s = buffers
    kv_full, q_full, d_o_full, empty = bars
    sample, kv_head, first_head, first, row_start, padded = place
    begin, end, n_steps, old, open_to = walk
    bias_base, bias_length, ends = vectors
    scale, factor, length, window = numbers
    dtype: gl.constexpr = q_s.dtype
    BLOCK_M: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    SIZE: gl.constexpr = sizes[3]
    PACKED: gl.constexpr = sizes[4]
    WARPS: gl.constexpr = sizes[5]
    groups: gl.constexpr = BLOCK_M // 64
    q_columns: gl.constexpr = D * 4 * groups // WARPS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * groups, WARPS // 4 // groups], [16, q_columns, 16]
    )
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    keys = first + gl.arange(0, BLOCK_N, layout=key_layout)
    bias = gl.load(bias_base + keys, mask=keys < bias_length, other=0.0)
    key_end = keys
    if PACKED:
        key_end = gl.load(ends + keys, mask=keys < length, other=0)
    d_bias = gl.full([BLOCK_N], 0.0, gl.float32, layout=key_layout)
    d_k = gl.full([BLOCK_N, D], 0.0, gl.float32, layout=kv_layout)
    d_v = gl.full([BLOCK_N, D], 0.0, gl.float32, layout=kv_layout)

    operand: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    no_scores = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout=s_layout)
    no_d_q = gl.full([BLOCK_M, D], 0.0, gl.float32, layout=q_layout)
    vectors = (keys, key_end, bias)

    # Products of a step's ds run beside the exponentials of the next step; the first uses zeros.
    ds_s.store(gl.full([BLOCK_N, BLOCK_M], 0.0, dtype, layout=s_layout))
    fence_async_shared()
    barrier()
    mbarrier.wait(kv_full, 0)
    query, stage, before, phase = begin, 0, 0, 0
    # addresses are loop variables: sums of a base and an offset would need more registers
    dq_rows = dq_base + (row_start + begin).to(gl.int64) * SIZE
    last_dq_rows = (
        dq_rows + 0
    )  # a separate value: the compiler does not accept an alias as a loop variable
    for step in range(n_steps):
        masked = query < old
        if PACKED:
            masked = masked | (query + BLOCK_M > open_to)
        q, d_o = q_s.index(stage), d_o_s.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        scores = warpgroup_mma(k_s, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        d_k_next = warpgroup_mma(ds_s, q_s.index(before), d_k, is_async=True)
        d_q = warpgroup_mma(ds_s.permute((1, 0)), k_s, no_d_q, use_acc=False, is_async=True)
        row_lse = lse_s.index(stage).load(row_layout)
        scores = warpgroup_mma_wait(2, deps=[scores])
        weights = _weights(scores, vectors, row_lse, query, masked, factor, window, PACKED)
        weights = weights.to(dtype)
        mbarrier.wait(d_o_full.index(stage), phase)
        d_weights = warpgroup_mma(v_s, d_o.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        d_k, d_q = warpgroup_mma_wait(1, deps=[d_k_next, d_q])
        _add_rows(last_dq_rows, d_q, SIZE)
        narrow = gl.convert_layout(weights, operand)
        d_v_next = warpgroup_mma(narrow, d_o, d_v, is_async=True)
        row_delta = delta_s.index(stage).load(row_layout)
        d_weights = warpgroup_mma_wait(1, deps=[d_weights])
        ds = weights.to(gl.float32) * (d_weights - row_delta[None, :])
        d_bias = _bias_gradient(d_bias, ds, keys, query, masked, window)
        barrier()  # all warps have read ds and the queries of the previous step
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        ds_s.store(ds.to(dtype))
        fence_async_shared()
        barrier()
        d_v, narrow = warpgroup_mma_wait(0, deps=[d_v_next, narrow])
        last_dq_rows, before = dq_rows, stage
        query, stage = query + BLOCK_M, stage + 1
        dq_rows += BLOCK_M * SIZE
        if stage == q_s.type.shape[0]:
            stage, phase = 0, phase ^ 1
        if query >= end:  # the next head
            dq_rows += (padded - (query - begin)) * SIZE
            query = begin
    d_k_next = warpgroup_mma(ds_s, q_s.index(before), d_k, is_async=True)
    d_q = warpgroup_mma(ds_s.permute((1, 0)), k_s, no_d_q, use_acc=False, is_async=True)
    d_k, d_q = warpgroup_mma_wait(0, deps=[d_k_next, d_q])
    _add_rows(last_dq_rows, d_q, SIZE)

    rows = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, kv_layout))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, kv_layout))
    offset = rows.to(gl.int64)[:, None] * dk_strides + channels[None, :]
    inside = (rows[:, None] < length) & (channels[None, :] < SIZE)
    gl.store(dk + offset, (d_k * scale).to(dk.dtype.element_ty), mask=inside)
    gl.store(dv + offset, d_v.to(dv.dtype.element_ty), mask=inside)
    gl.store(d_log_keep + out_start + keys, d_bias, mask=keys < length)


@gluon.jit
def _add_rows(first, values, SIZE: gl.constexpr):
    """Add values [rows, D] to float32 memory [., SIZE], from the row at address `first` on."""
    layout: gl.constexpr = values.type.layout
    rows = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    channels = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    tile = (first + rows * SIZE)[:, None] + channels[None, :]
    if values.shape[1] == SIZE:
        gl.atomic_add(tile, values, sem="relaxed")
    else:
        gl.atomic_add(tile, values, mask=channels[None, :] < SIZE, sem="relaxed")


@gluon.jit(
    do_not_specialize=[
        "length",
        "padded",
        "n_blocks",
        "window",
        "section",
        "n_heads",
        "group",
        "per_program",
    ]
)
def attend_backward(
    q_desc, k_desc, v_desc, d_o_desc, lse_desc, delta_desc, dq, dk, dv,
    stride_b, stride_h, stride_s, bias, d_log_keep, counts, ends,
    scale, length, padded, n_blocks, window, section,
    n_heads, group, per_program, D: gl.constexpr,
    SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LIST_BLOCK: gl.constexpr,
    PACKED: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys; see `triton_backward.attend_backward`.

    dq is float32 [b, h, padded, SIZE] without `scale`; dk and dv are [b, h / per_program, s, d],
    with the given strides; lse and delta are [b * h * padded]. bias and counts come from
    `prepare_bias`.
    """
    kv_heads = n_heads // group
    members = group // per_program
    n_tiles = gl.cdiv(length, BLOCK_N)
    pairs = gl.num_programs(0) // (n_tiles * members)
    rank, pair, member = place_of(n_tiles, pairs, members, section)
    first = rank * BLOCK_N
    sample, kv_head = pair // kv_heads, pair % kv_heads
    part = kv_head * members + member

    end, open_to = length, length
    if PACKED:
        end = gl.load(ends + gl.minimum(first + BLOCK_N, length) - 1)
        open_to = gl.load(ends + first)
    begin = first // BLOCK_M * BLOCK_M
    old = gl.cdiv(first + BLOCK_N + window, BLOCK_M) * BLOCK_M
    counts += pair.to(gl.int64) * (n_blocks + 1)
    live_before = gl.load(counts + first // LIST_BLOCK)
    live_after = gl.load(counts + gl.minimum(gl.cdiv(first + BLOCK_N, LIST_BLOCK), n_blocks))
    if live_before == live_after:  # all evicted: no query outside the window reads these keys
        end = gl.minimum(end, old)
    n_steps = gl.cdiv(end - begin, BLOCK_M) * per_program

    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_M, D], tile_layout(q_desc))
    d_o_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_M, D], tile_layout(d_o_desc))
    k_s = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, D], tile_layout(k_desc))
    v_s = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, D], tile_layout(v_desc))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, BLOCK_M], ds_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_o_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(d_o_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()

    first_head = part * per_program
    place = (sample, kv_head, first_head, first, (sample * n_heads + first_head) * padded, padded)
    walk = (begin, end, n_steps, old, open_to)
    start = sample.to(gl.int64) * stride_b + part.to(gl.int64) * stride_h
    out_start = (sample * kv_heads * members + part).to(gl.int64) * length
    outputs = (dq, dk + start, dv + start, d_log_keep, stride_s, out_start)
    bias_length = n_blocks * LIST_BLOCK
    vectors = (bias + pair.to(gl.int64) * bias_length, bias_length, ends)
    numbers = (scale, scale * 1.4426950408889634, length, window)
    buffers = (q_s, d_o_s, k_s, v_s, ds_s, lse_s, delta_s)
    bars = (kv_full, q_full, d_o_full, empty)
    descs = (q_desc, k_desc, v_desc, d_o_desc, lse_desc, delta_desc)
    sizes: gl.constexpr = (BLOCK_M, BLOCK_N, D, SIZE, PACKED, WARPS)
    gl.warp_specialize(
        [
            (_gradients, (outputs, buffers, bars, place, walk, vectors, numbers, sizes)),
            (_fetch, (descs, buffers, bars, place, walk, BLOCK_M)),
        ],
        [1],
        [24],
    )
