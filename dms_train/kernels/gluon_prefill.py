"""The attention of `triton_prefill` for Hopper: one warp loads, two groups of warps compute.

Tiles arrive in rings of shared memory by the bulk copy engine. Each group owns half of a block's
queries and keeps two matrix products in flight: scores of the next tile run beside the softmax of
this one and beside its product with the values.

Shape letters as in `triton_prefill`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dms_train.kernels.triton_pack import EDGE, Pages, Stretch


@gluon.jit
def _load_tile(descriptor, row, column, full, empty, ring, place, STAGES: gl.constexpr):
    """Have the next tile copied into its place of a ring as soon as that is free."""
    stage = place % STAGES
    # the first round passes at once: a fresh barrier counts as one whose phase 1 is complete
    mbarrier.wait(empty.index(stage), (place // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _load_slots(
    descriptor, table, slot, half, count, full, empty, ring, place, STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):
    """The same for keys (half 0) or values (half 1) of slots, in parts that lie in one page."""
    PART: gl.constexpr = descriptor.block_type.shape[0]
    BLOCK_N: gl.constexpr = ring.type.shape[1]
    stage = place % STAGES
    mbarrier.wait(empty.index(stage), (place // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), BLOCK_N * ring.type.shape[2] * ring.dtype.primitive_bitwidth // 8)
    tile = ring.index(stage)
    for part in gl.static_range(BLOCK_N // PART):
        # slots behind the list are masked; any page will do for them
        x = gl.minimum(slot + part * PART, count - 1)
        row = (gl.load(table + x // PAGE) * 2 + half) * PAGE + x // PART * PART % PAGE
        into = tile.slice(part * PART, PART, 0)
        tma.async_copy_global_to_shared(descriptor, [row, 0], full.index(stage), into)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, p_desc, q_at, k_at, v_at, table, span,
    rings,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):
    """The loading warp: the queries, then recent tiles, then tiles of survivors."""
    HALF: gl.constexpr = q_desc.block_type.shape[0]
    q_ring, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty = rings
    q_row, q_column = q_at
    k_row, k_column = k_at
    v_row, v_column = v_at
    base, recent, count = span
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [q_row + group * HALF, q_column], q_full.index(group), q_ring.index(group)
        )
    for t in range(recent):
        j = base + t * BLOCK_N
        _load_tile(k_desc, k_row + j, k_column, k_full, k_empty, k_ring, t, STAGES)
        _load_tile(v_desc, v_row + j, v_column, v_full, v_empty, v_ring, t, STAGES)
    for t in range((count + BLOCK_N - 1) // BLOCK_N):
        _load_slots(p_desc, table, t * BLOCK_N, 0, count, k_full, k_empty, k_ring, recent + t, STAGES, PAGE)
        _load_slots(p_desc, table, t * BLOCK_N, 1, count, v_full, v_empty, v_ring, recent + t, STAGES, PAGE)


@gluon.jit
def _weigh(scores, top, total, factor):
    """Online softmax of one tile in powers of two: weights, shrinkage, new maximum and sum."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _only_recent(scores, i, j, evicted, first, s, window, layout: gl.constexpr):
    """Scores of dense keys j (slice of `layout`) as the visibility rule has it."""
    present = (j < s) & (j >= first)
    marked = gl.load(evicted + j, mask=present, other=1) != 0
    reach = gl.where(marked, window, s)
    distance = gl.expand_dims(i, 1) - gl.expand_dims(j, 0)
    visible = (distance >= 0) & (distance <= gl.expand_dims(gl.where(present, reach, -1), 0))
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _scores(q, k_ring, k_full, t, init, STAGES: gl.constexpr):
    """Start the scores of tile t."""
    stage = t % STAGES
    mbarrier.wait(k_full.index(stage), (t // STAGES) & 1)
    return warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), init, use_acc=False, is_async=True)


@gluon.jit
def _values(weights, v_ring, v_full, t, acc, STAGES: gl.constexpr):
    """Start adding the weighted values of tile t."""
    stage = t % STAGES
    mbarrier.wait(v_full.index(stage), (t // STAGES) & 1)
    return warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)


@gluon.jit
def _consume(
    group: gl.constexpr, out, evicted, o_stride, block, first, s, n, window, factor, span,
    rings,
    HALF: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """One computing group: its half of the block's queries over all tiles."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q_ring, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty = rings
    dtype: gl.constexpr = q_ring.dtype
    base, recent, count = span
    offset = block * (2 * HALF) + group * HALF
    i = offset + s - n + gl.arange(0, HALF, ROWS)
    columns = gl.arange(0, BLOCK_N, COLUMNS)
    acc = gl.zeros([HALF, D], gl.float32, O_LAYOUT)
    blank = gl.zeros([HALF, BLOCK_N], gl.float32, S_LAYOUT)
    top = gl.full([HALF], -1e30, gl.float32, ROWS)
    total = gl.zeros([HALF], gl.float32, ROWS)
    q = q_ring.index(group)
    mbarrier.wait(q_full.index(group), 0)

    scores = warpgroup_mma_wait(0, [_scores(q, k_ring, k_full, 0, blank, STAGES)])
    mbarrier.arrive(k_empty.index(0))
    scores = _only_recent(scores, i, base + columns, evicted, first, s, window, S_LAYOUT)
    weights, shrink, top, total = _weigh(scores, top, total, factor)
    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    for t in range(1, recent):
        coming = _scores(q, k_ring, k_full, t, blank, STAGES)
        adding = _values(p, v_ring, v_full, t - 1, acc, STAGES)
        scores = warpgroup_mma_wait(1, [coming])
        mbarrier.arrive(k_empty.index(t % STAGES))
        j = base + t * BLOCK_N + columns
        scores = _only_recent(scores, i, j, evicted, first, s, window, S_LAYOUT)
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        mbarrier.arrive(v_empty.index((t - 1) % STAGES))
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    full = count // BLOCK_N
    for t in range(recent, recent + full):
        coming = _scores(q, k_ring, k_full, t, blank, STAGES)
        adding = _values(p, v_ring, v_full, t - 1, acc, STAGES)
        scores = warpgroup_mma_wait(1, [coming])
        mbarrier.arrive(k_empty.index(t % STAGES))
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        mbarrier.arrive(v_empty.index((t - 1) % STAGES))
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    last = recent + full
    if full * BLOCK_N < count:
        coming = _scores(q, k_ring, k_full, last, blank, STAGES)
        adding = _values(p, v_ring, v_full, last - 1, acc, STAGES)
        scores = warpgroup_mma_wait(1, [coming])
        held = full * BLOCK_N + columns < count
        scores = gl.where(gl.expand_dims(held, 0), scores, float("-inf"))
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        last += 1
    adding = _values(p, v_ring, v_full, last - 1, acc, STAGES)
    acc, p = warpgroup_mma_wait(0, [adding, p])
    acc = acc / gl.convert_layout(gl.where(total == 0, 1.0, total), OUT_ROWS)[:, None]
    asked = offset + gl.arange(0, HALF, OUT_ROWS)
    channels = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    at = out + gl.expand_dims(asked.to(gl.int64) * o_stride, 1) + gl.expand_dims(channels, 0)
    gl.store(at, acc.to(dtype), mask=gl.expand_dims(asked < n, 1))


# lengths differ from call to call and are no reason to compile again
@gluon.jit(do_not_specialize=["heads", "s", "n", "places", "newest", "window"])
def _attend_kernel(
    q_desc, k_desc, v_desc, p_desc, out, table, evicted, edges, start, order,
    q_steps, k_steps, v_steps, o_strides, heads, s, n, places, newest, window, factor,
    GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, EDGE: gl.constexpr, STAGES: gl.constexpr,
):
    """One block of queries of one query head; lanes with most to read come first."""
    HALF: gl.constexpr = BLOCK_M // 2
    blocks = gl.cdiv(n, BLOCK_M)
    job = gl.program_id(0)
    lane = gl.load(order + job // (blocks * GROUP)).to(gl.int32)
    block = blocks - 1 - job % (blocks * GROUP) // GROUP
    b, h = lane // heads, lane % heads
    head = h * GROUP + job % GROUP
    out += b.to(gl.int64) * o_strides[0] + head * o_strides[1]
    evicted += lane.to(gl.int64) * s
    edge = gl.maximum(gl.minimum(block * BLOCK_M + s - n - window, newest), 0) // EDGE
    count = gl.load(edges + lane * (gl.cdiv(s, EDGE) + 1) + edge)
    first = gl.load(start + b)
    base = edge * EDGE
    end = gl.minimum(block * BLOCK_M + BLOCK_M + s - n, s)
    span = (base, gl.cdiv(end - base, BLOCK_N), count)

    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [2, HALF, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(2):
        mbarrier.init(q_full.index(x), count=1)
    for x in gl.static_range(STAGES):
        mbarrier.init(k_full.index(x), count=1)
        mbarrier.init(v_full.index(x), count=1)
        mbarrier.init(k_empty.index(x), count=2)
        mbarrier.init(v_empty.index(x), count=2)
    rings = (q_ring, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_consume, (0, out, evicted, o_strides[2], block, first, s, n, window, factor, span,
                        rings, HALF, D, BLOCK_N, STAGES)),
            (_consume, (1, out, evicted, o_strides[2], block, first, s, n, window, factor, span,
                        rings, HALF, D, BLOCK_N, STAGES)),
            (_produce, (q_desc, k_desc, v_desc, p_desc,
                        (b * q_steps[0] + head * q_steps[1] + block * BLOCK_M, head * q_steps[2]),
                        (b * k_steps[0] + h * k_steps[1], h * k_steps[2]),
                        (b * v_steps[0] + h * v_steps[1], h * v_steps[2]),
                        table + lane * places, span,
                        rings, BLOCK_N, PAGE, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def _matrix(x: Tensor, rows: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """Heads x [b, h, n, d] as one matrix, and what b and h add to its row and h to its column."""
    b, h, n, d = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, d], gl.bfloat16)
    sb, sh, sn, _ = x.stride()
    if sb == n * sn or b == 1:
        if sh < sn or h == 1:
            shape, steps = [b * n, (h - 1) * sh + d], (n, 0, sh)
            return TensorDescriptor(x, shape, [sn, 1], [rows, d], layout), steps
    x = x.contiguous()
    shape, steps = [b * h * n, d], (h * n, n, 0)
    return TensorDescriptor(x, shape, [d, 1], [rows, d], layout), steps


def _slots(pages: Tensor, rows: int) -> TensorDescriptor:
    """All pages as one matrix of slots, also those that lie behind this tensor."""
    page, d = pages.shape[2:]
    part = [min(rows, page), d]
    layout = gl.NVMMASharedLayout.get_default_for(part, gl.bfloat16)
    return TensorDescriptor(pages, [2**31 - 1, d], [d, 1], part, layout)


def attend_stretch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stretch: Stretch,
    pages: Pages,
    *,
    window: int,
    scale: float,
    config: dict | None = None,
) -> Tensor:
    b, hq, n, d = query.shape
    h, s = key.shape[1:3]
    out = torch.empty(b, n, hq, d, dtype=query.dtype, device=query.device).transpose(1, 2)
    order = stretch.lengths.flatten().argsort(descending=True)
    config = {"BLOCK_N": 128, "STAGES": 2} | (config or {})
    grid = (-(-n // 128) * hq * b,)
    bn = config["BLOCK_N"]
    (q_desc, q_steps), (k_desc, k_steps), (v_desc, v_steps) = (
        _matrix(x, rows) for x, rows in ((query, 64), (key, bn), (value, bn))
    )
    _attend_kernel[grid](
        q_desc, k_desc, v_desc, _slots(pages.pages, bn), out, pages.table,
        stretch.evicted.view(torch.uint8), stretch.edges, stretch.start, order,
        q_steps, k_steps, v_steps, out.stride()[:3],
        h, s, n, pages.table.shape[-1], s - stretch.kept, window, scale * 1.4426950408889634,
        GROUP=hq // h, PAGE=pages.pages.shape[2], D=d, EDGE=EDGE, BLOCK_M=128, num_warps=4,
        **config,
    )  # fmt: skip
    return out
