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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dms_train.kernels.prefill import EDGE
from dms_train.kernels.triton_prefill import LOG2_E, Call

# Queries of a block, half for each computing group.
_ROWS = 128


@gluon.jit
def _load_tile(descriptor, row, column, pipe, t):
    """Have tile t copied into its place of a ring as soon as that is free."""
    ring, full, empty = pipe
    STAGES: gl.constexpr = ring.type.shape[0]
    stage = t % STAGES
    # the first round passes at once: a fresh barrier counts as one whose phase 1 is complete
    mbarrier.wait(empty.index(stage), (t // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _load_slots(descriptor, table, slot, count, half, pipe, t, PAGE: gl.constexpr):
    """The same for keys (half 0) or values (half 1) of slots, in parts that lie in one page."""
    ring, full, empty = pipe
    STAGES: gl.constexpr = ring.type.shape[0]
    PART: gl.constexpr = descriptor.block_type.shape[0]
    PARTS: gl.constexpr = ring.type.shape[1] // PART
    stage = t % STAGES
    mbarrier.wait(empty.index(stage), (t // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        # slots behind the list are masked; any page will do for them
        x = gl.minimum(slot + part * PART, count - 1)
        row = (gl.load(table + x // PAGE) * 2 + half) * PAGE + x // PART * PART % PAGE
        into = ring.index(stage).slice(part * PART, PART, 0)
        tma.async_copy_global_to_shared(descriptor, [row, 0], full.index(stage), into)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, p_desc, q_at, k_at, v_at, table, span, q_pipe, k_pipe, v_pipe,
    PAGE: gl.constexpr,
):  # fmt: skip
    """The loading warp: the queries, then recent tiles, then tiles of survivors."""
    HALF: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    q_ring, q_full = q_pipe[0], q_pipe[1]
    base, recent, count = span
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), q_desc.block_type.nbytes)
        q_half = [q_at[0] + half * HALF, q_at[1]]
        tma.async_copy_global_to_shared(q_desc, q_half, q_full.index(half), q_ring.index(half))
    for t in range(recent):
        j = base + t * BLOCK_N
        _load_tile(k_desc, k_at[0] + j, k_at[1], k_pipe, t)
        _load_tile(v_desc, v_at[0] + j, v_at[1], v_pipe, t)
    for t in range(gl.cdiv(count, BLOCK_N)):
        _load_slots(p_desc, table, t * BLOCK_N, count, 0, k_pipe, recent + t, PAGE)
        _load_slots(p_desc, table, t * BLOCK_N, count, 1, v_pipe, recent + t, PAGE)


@gluon.jit
def _weigh(scores, top, total, factor):
    """Online softmax of one tile in powers of two: weights, shrinkage, new maximum and sum."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _only_recent(scores, i, j, evicted, first, s, window):
    """Scores of dense keys j as the visibility rule has it."""
    present = (j < s) & (j >= first)
    marked = gl.load(evicted + j, mask=present, other=1) != 0
    reach = gl.where(marked, window, s)
    distance = gl.expand_dims(i, 1) - gl.expand_dims(j, 0)
    visible = (distance >= 0) & (distance <= gl.expand_dims(gl.where(present, reach, -1), 0))
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _scores(q, pipe, t, blank):
    """Start the scores of tile t."""
    ring, full = pipe[0], pipe[1]
    STAGES: gl.constexpr = ring.type.shape[0]
    stage = t % STAGES
    mbarrier.wait(full.index(stage), (t // STAGES) & 1)
    return warpgroup_mma(q, ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def _values(weights, pipe, t, acc):
    """Start adding the weighted values of tile t."""
    ring, full = pipe[0], pipe[1]
    STAGES: gl.constexpr = ring.type.shape[0]
    stage = t % STAGES
    mbarrier.wait(full.index(stage), (t // STAGES) & 1)
    return warpgroup_mma(weights, ring.index(stage), acc, is_async=True)


@gluon.jit
def _release(pipe, t):
    """Tell the loading warp that tile t has been read."""
    STAGES: gl.constexpr = pipe[0].type.shape[0]
    mbarrier.arrive(pipe[2].index(t % STAGES))


@gluon.jit
def _consume(
    half: gl.constexpr, out, evicted, o_stride, block, first, s, n, window, factor, span,
    q_pipe, k_pipe, v_pipe,
):  # fmt: skip
    """One computing group: its half of the block's queries over all tiles."""
    q_ring, q_full = q_pipe[0], q_pipe[1]
    HALF: gl.constexpr = q_ring.type.shape[1]
    D: gl.constexpr = q_ring.type.shape[2]
    BLOCK_N: gl.constexpr = k_pipe[0].type.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = q_ring.dtype
    base, recent, count = span
    offset = block * (2 * HALF) + half * HALF
    i = offset + s - n + gl.arange(0, HALF, ROWS)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    acc = gl.zeros([HALF, D], gl.float32, O_LAYOUT)
    blank = gl.zeros([HALF, BLOCK_N], gl.float32, S_LAYOUT)
    top = gl.full([HALF], -1e30, gl.float32, ROWS)
    total = gl.zeros([HALF], gl.float32, ROWS)
    q = q_ring.index(half)
    mbarrier.wait(q_full.index(half), 0)

    scores = warpgroup_mma_wait(0, [_scores(q, k_pipe, 0, blank)])
    _release(k_pipe, 0)
    scores = _only_recent(scores, i, base + columns, evicted, first, s, window)
    weights, shrink, top, total = _weigh(scores, top, total, factor)
    p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    for t in range(1, recent):
        coming = _scores(q, k_pipe, t, blank)
        adding = _values(p, v_pipe, t - 1, acc)
        scores = warpgroup_mma_wait(1, [coming])
        _release(k_pipe, t)
        scores = _only_recent(scores, i, base + t * BLOCK_N + columns, evicted, first, s, window)
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        _release(v_pipe, t - 1)
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    full = count // BLOCK_N
    for t in range(recent, recent + full):
        coming = _scores(q, k_pipe, t, blank)
        adding = _values(p, v_pipe, t - 1, acc)
        scores = warpgroup_mma_wait(1, [coming])
        _release(k_pipe, t)
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        _release(v_pipe, t - 1)
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    last = recent + full
    if full * BLOCK_N < count:
        coming = _scores(q, k_pipe, last, blank)
        adding = _values(p, v_pipe, last - 1, acc)
        scores = warpgroup_mma_wait(1, [coming])
        held = full * BLOCK_N + columns < count
        scores = gl.where(gl.expand_dims(held, 0), scores, float("-inf"))
        weights, shrink, top, total = _weigh(scores, top, total, factor)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        acc = acc * gl.convert_layout(shrink, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        last += 1
    adding = _values(p, v_pipe, last - 1, acc)
    acc, p = warpgroup_mma_wait(0, [adding, p])
    acc = acc / gl.convert_layout(gl.where(total == 0, 1.0, total), OUT_ROWS)[:, None]
    asked = offset + gl.arange(0, HALF, OUT_ROWS)
    channels = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    at = out + gl.expand_dims(asked.to(gl.int64) * o_stride, 1) + gl.expand_dims(channels, 0)
    gl.store(at, acc.to(dtype), mask=gl.expand_dims(asked < n, 1))


@gluon.jit
def _pipe(descriptor, STAGES: gl.constexpr):
    """A ring of tiles with the barriers that say which are full and which are free again."""
    shape: gl.constexpr = descriptor.block_type.shape
    ring = gl.allocate_shared_memory(
        descriptor.dtype, [STAGES, shape[0], shape[1]], descriptor.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(STAGES):
        mbarrier.init(full.index(x), count=1)
        mbarrier.init(empty.index(x), count=2)  # both computing groups read a tile
    return ring, full, empty


# lengths differ from call to call and are no reason to compile again
@gluon.jit(do_not_specialize=["heads", "group", "s", "n", "places", "newest", "window"])
def _attend_kernel(
    q_desc, k_desc, v_desc, p_desc, out, table, evicted, edges, start, order,
    q_steps, k_steps, v_steps, o_strides, heads, group, s, n, places, newest, window, factor,
    PAGE: gl.constexpr, EDGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One block of queries of one query head; lanes with most to read come first."""
    BLOCK_M: gl.constexpr = 2 * q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    blocks = gl.cdiv(n, BLOCK_M)
    job = gl.program_id(0)
    lane = gl.load(order + job // (blocks * group)).to(gl.int32)
    block = blocks - 1 - job % (blocks * group) // group
    b, h = lane // heads, lane % heads
    head = h * group + job % group
    out += b.to(gl.int64) * o_strides[0] + head * o_strides[1]
    evicted += lane.to(gl.int64) * s
    edge = gl.maximum(gl.minimum(block * BLOCK_M + s - n - window, newest), 0) // EDGE
    count = gl.load(edges + lane * (gl.cdiv(s, EDGE) + 1) + edge)
    first = gl.load(start + b)
    base = edge * EDGE
    end = gl.minimum(block * BLOCK_M + BLOCK_M + s - n, s)
    span = (base, gl.cdiv(end - base, BLOCK_N), count)
    q_pipe = _pipe(q_desc, 2)
    k_pipe = _pipe(k_desc, STAGES)
    v_pipe = _pipe(v_desc, STAGES)
    q_at = (b * q_steps[0] + head * q_steps[1] + block * BLOCK_M, head * q_steps[2])
    k_at = (b * k_steps[0] + h * k_steps[1], h * k_steps[2])
    v_at = (b * v_steps[0] + h * v_steps[1], h * v_steps[2])
    table += lane * places
    o_stride = o_strides[2]
    gl.warp_specialize(
        [
            (_consume, (0, out, evicted, o_stride, block, first, s, n, window, factor, span,
                        q_pipe, k_pipe, v_pipe)),
            (_consume, (1, out, evicted, o_stride, block, first, s, n, window, factor, span,
                        q_pipe, k_pipe, v_pipe)),
            (_produce, (q_desc, k_desc, v_desc, p_desc, q_at, k_at, v_at, table, span,
                        q_pipe, k_pipe, v_pipe, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _matrix(x: Tensor, rows: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """Heads x [b, h, n, d] as one matrix, and what b and h add to its row and h to its column."""
    b, h, n, d = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, d], gl.bfloat16)
    sb, sh, sn, _ = x.stride()
    aligned = x.data_ptr() % 16 == 0 and sn % 8 == 0 and sh % 8 == 0
    if aligned and (sb == n * sn or b == 1) and (sh < sn or h == 1):
        shape, steps = [b * n, (h - 1) * sh + d], (n, 0, sh)
        return TensorDescriptor(x, shape, [sn, 1], [rows, d], layout), steps
    x = x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    shape, steps = [b * h * n, d], (h * n, n, 0)
    return TensorDescriptor(x, shape, [d, 1], [rows, d], layout), steps


def _slots(pages: Tensor, rows: int) -> TensorDescriptor:
    """All pages as one matrix of slots, also those that lie behind this tensor."""
    page, d = pages.shape[2:]
    part = [min(rows, page), d]
    layout = gl.NVMMASharedLayout.get_default_for(part, gl.bfloat16)
    return TensorDescriptor(pages, [2**31 - 1, d], [d, 1], part, layout)


def fits(call: Call) -> bool:
    """Whether `attend` takes this problem on this device."""
    query = call.tokens.query
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] in (64, 128, 256)
        and call.page_slots >= 16
    )


def attend(call: Call, keys: int | None = None, stages: int = 2) -> Tensor:
    """The second half of `prefill.extend` on Hopper, in tiles of `keys` keys."""
    (query, key, value), stretch, pages, window, scale = call
    b, hq, n, d = query.shape
    h, s = key.shape[1:3]
    keys = keys or (128 if d <= 128 else 64)
    out = call.empty()
    q_desc, q_steps = _matrix(query, _ROWS // 2)
    k_desc, k_steps = _matrix(key, keys)
    v_desc, v_steps = _matrix(value, keys)
    _attend_kernel[(-(-n // _ROWS) * hq * b,)](
        q_desc, k_desc, v_desc, _slots(pages.pages, keys), out, pages.table,
        stretch.evicted.view(torch.uint8), stretch.edges, stretch.start, call.order(),
        q_steps, k_steps, v_steps, out.stride()[:3],
        h, hq // h, s, n, pages.table.shape[-1], s - stretch.kept, window, scale * LOG2_E,
        PAGE=call.page_slots, EDGE=EDGE, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
