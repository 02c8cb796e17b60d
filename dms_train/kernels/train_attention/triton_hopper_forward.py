"""Forward pass for Hopper: the algorithm of `triton_forward`, scheduled by hand.

One warp fetches tiles with bulk copies. Two warpgroups run independently; each owns half of the
queries. While the tensor cores multiply the weights of one tile by its values, the warpgroup
computes the softmax of the next tile. Exponentials are powers of two.
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

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in triton 3.7


@gluon.jit
def _key_of(step, n_old, n_head, live_from, begin, near, blocks, BLOCK_N: gl.constexpr):
    """Return the first key of a step's tile: live old tiles, a document's first, nearest ones."""
    key = near + (step - n_old - n_head) * BLOCK_N
    if step < n_old + n_head:
        key = begin + (step - n_old) * BLOCK_N
    if step < n_old:
        key = gl.load(blocks + live_from + step) * BLOCK_N
    return key


@gluon.jit
def _fetch(descs, buffers, bars, place, walk, blocks, HALF: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy queries once, then keys, biases and values of every step."""
    q_desc, k_desc, v_desc, bias_desc = descs
    q_s, k_s, v_s, bias_s = buffers
    q_full, k_full, v_full, k_empty, v_empty = bars
    sample, head, kv_head, pair_start, first = place
    n_steps, n_old, n_head, live_from, begin, near = walk
    stages: gl.constexpr = k_s.type.shape[0]
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [sample, head, first, 0], q_full, q_s.index(0))
    tma.async_copy_global_to_shared(q_desc, [sample, head, first + HALF, 0], q_full, q_s.index(1))
    for step in range(n_steps):
        stage = step % stages
        phase = (step // stages & 1) ^ 1
        key = _key_of(step, n_old, n_head, live_from, begin, near, blocks, BLOCK_N)
        mbarrier.wait(k_empty.index(stage), phase)
        full = k_full.index(stage)
        mbarrier.expect(full, k_desc.block_type.nbytes + bias_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [sample, kv_head, key, 0], full, k_s.index(stage))
        tma.async_copy_global_to_shared(bias_desc, [pair_start + key], full, bias_s.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        full = v_full.index(stage)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [sample, kv_head, key, 0], full, v_s.index(stage))


@gluon.jit
def _biased(
    scores,
    bias,
    rows,
    starts,
    key,
    masked,
    factor,
    window,
    BLOCK_N: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Add the bias of keys outside the window to the scores, in powers of two; mask with -inf."""
    layout: gl.constexpr = scores.type.layout
    if masked:
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        distance = rows[:, None] - keys[None, :]
        tile = scores * factor + gl.where(distance > window, bias[None, :], 0.0)
        tile = gl.where(distance >= 0, tile, float("-inf"))
        if PACKED:
            tile = gl.where(keys[None, :] >= starts[:, None], tile, float("-inf"))
    else:
        tile = scores * factor + bias[None, :]
    return tile


@gluon.jit
def _weigh(tile, peak, total, operand: gl.constexpr, dtype: gl.constexpr):
    """Return weights as matrix operand, new row maximum and sum, and factor on older output."""
    new_peak = gl.maximum(peak, gl.max(tile, 1))
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(tile - base[:, None])
    fade = gl.exp2(peak - base)
    total = total * fade + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(dtype), operand), new_peak, total, fade


@gluon.jit
def _attend_half(
    PART: gl.constexpr, o_desc, buffers, bars, place, walk, blocks, row_data, numbers,
    sizes: gl.constexpr,
):  # fmt: skip
    """Attend half a tile of queries with four warps."""
    q_s, k_s, v_s, bias_s = buffers
    q_full, k_full, v_full, k_empty, v_empty = bars
    sample, head, kv_head, pair_start, first = place
    n_steps, n_old, n_head, live_from, begin, near = walk
    lse, starts = row_data
    factor, length, padded, window, lse_start = numbers
    HALF: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    PACKED: gl.constexpr = sizes[3]
    stages: gl.constexpr = k_s.type.shape[0]
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    rows = first + PART * HALF + gl.arange(0, HALF, layout=row_layout)
    row_starts = rows
    if PACKED:
        row_starts = gl.load(starts + rows, mask=rows < length, other=0)
    empty = gl.full([HALF, BLOCK_N], 0.0, gl.float32, layout=s_layout)
    peak = gl.full([HALF], float("-inf"), gl.float32, layout=row_layout)
    total = gl.full([HALF], 0.0, gl.float32, layout=row_layout)
    out = gl.full([HALF, D], 0.0, gl.float32, layout=o_layout)

    q = q_s.index(PART)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q, k_s.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    bias = bias_s.index(0).load(column_layout)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    key = _key_of(0, n_old, n_head, live_from, begin, near, blocks, BLOCK_N)
    tile = _biased(scores, bias, rows, row_starts, key, n_old == 0, factor, window, BLOCK_N, PACKED)
    weights, peak, total, fade = _weigh(tile, peak, total, operand, dtype)

    for step in range(1, n_steps):
        stage = step % stages
        before = (step - 1) % stages
        mbarrier.wait(k_full.index(stage), step // stages & 1)
        scores = warpgroup_mma(
            q, k_s.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), (step - 1) // stages & 1)
        product = warpgroup_mma(weights, v_s.index(before), out, is_async=True)
        bias = bias_s.index(stage).load(column_layout)
        key = _key_of(step, n_old, n_head, live_from, begin, near, blocks, BLOCK_N)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        masked = step >= n_old
        tile = _biased(scores, bias, rows, row_starts, key, masked, factor, window, BLOCK_N, PACKED)
        later, peak, total, fade = _weigh(tile, peak, total, operand, dtype)
        out, weights = warpgroup_mma_wait(0, deps=[product, weights])
        mbarrier.arrive(v_empty.index(before), count=1)
        out = out * gl.convert_layout(fade, o_row_layout)[:, None]
        weights = later

    last = (n_steps - 1) % stages
    mbarrier.wait(v_full.index(last), (n_steps - 1) // stages & 1)
    out = warpgroup_mma(weights, v_s.index(last), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    out = out / gl.convert_layout(total, o_row_layout)[:, None]
    q.store(out.to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(o_desc, [sample, head, first + PART * HALF, 0], q)
    value = gl.where(rows < length, peak + gl.log2(total), float("inf"))
    gl.store(lse + lse_start + rows, value, mask=rows < padded)
    tma.store_wait(0)


@gluon.jit
def place_of(n_tiles, pairs, members, section):
    """Return tile (0 runs first), pair and member, as in `triton_forward.place_of`."""
    program = gl.program_id(0)
    start = program // (section * n_tiles * members) * section
    width = gl.minimum(section, pairs - start) * members
    rank = program - start * n_tiles * members
    return rank // width, start + rank % width // members, rank % width % members


@gluon.jit(
    do_not_specialize=["length", "padded", "n_blocks", "window", "section", "n_heads", "group"]
)
def attend(
    q_desc, k_desc, v_desc, o_desc, bias_desc, lse, blocks, counts, starts,
    scale, length, padded, n_blocks, window, section,
    n_heads, group, D: gl.constexpr, HALF: gl.constexpr,
    BLOCK_N: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend one tile of 2 * HALF queries. Warps that compute have REGISTERS registers per thread.

    Descriptors are [b, h, s, d]; bias is [b * hk * n_blocks * BLOCK_N]; lse is [b, h, padded], log2
    of the sum of exponentials, +inf after the end.
    """
    BLOCK_M: gl.constexpr = 2 * HALF
    n_tiles = gl.cdiv(length, BLOCK_M)
    kv_heads = n_heads // group
    pairs = gl.num_programs(0) // (n_tiles * group)
    rank, pair, member = place_of(n_tiles, pairs, group, section)
    first = (n_tiles - 1 - rank) * BLOCK_M
    sample, kv_head = pair // kv_heads, pair % kv_heads
    head = kv_head * group + member
    blocks += pair.to(gl.int64) * n_blocks
    counts += pair.to(gl.int64) * (n_blocks + 1)

    begin, open_from = 0, 0
    if PACKED:
        begin = gl.load(starts + first) // BLOCK_N * BLOCK_N
        last = gl.minimum(first + BLOCK_M, length) - 1
        open_from = gl.cdiv(gl.load(starts + last), BLOCK_N) * BLOCK_N
    end = gl.minimum(first + BLOCK_M, length)
    edge = gl.maximum(first - window, 0) // BLOCK_N * BLOCK_N
    open_from = gl.minimum(open_from, edge)
    near = gl.maximum(edge, begin)
    live_from = gl.load(counts + open_from // BLOCK_N)
    n_old = gl.load(counts + edge // BLOCK_N) - live_from
    n_head = gl.maximum(open_from - begin, 0) // BLOCK_N
    n_steps = n_old + n_head + gl.cdiv(end - near, BLOCK_N)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, D], tile_layout(q_desc))
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], tile_layout(k_desc))
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, D], tile_layout(v_desc))
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], bias_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    buffers = (q_s, k_s, v_s, bias_s)
    bars = (q_full, k_full, v_full, k_empty, v_empty)
    place = (sample, head, kv_head, pair * n_blocks * BLOCK_N, first)
    walk = (n_steps, n_old, n_head, live_from, begin, near)
    lse_start = (sample * n_heads + head).to(gl.int64) * padded
    numbers = (scale * 1.4426950408889634, length, padded, window, lse_start)
    rows = (lse, starts)
    descs = (q_desc, k_desc, v_desc, bias_desc)
    sizes: gl.constexpr = (HALF, BLOCK_N, D, PACKED)
    gl.warp_specialize(
        [
            (
                _attend_half,
                (0, o_desc, buffers, bars, place, walk, blocks, rows, numbers, sizes),
            ),
            (
                _attend_half,
                (1, o_desc, buffers, bars, place, walk, blocks, rows, numbers, sizes),
            ),
            (_fetch, (descs, buffers, bars, place, walk, blocks, HALF, BLOCK_N)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.constexpr_function
def tile_layout(desc):
    """Return the shared-memory layout of a descriptor's last two dimensions."""
    layout = desc.layout
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2)
