"""Attention of `triton_attention` for Hopper: one warp loads, two warpgroups compute.

The bulk copy engine (TMA) copies tiles into rings of shared memory. Each warpgroup computes half of
a block's queries. It keeps two matrix products in flight: the scores of the next tile, and this
tile's weights times its values. There is one program per multiprocessor. Its loading warp takes the
next job as soon as it has issued all loads of the previous one. Loads of the next block therefore
overlap with the end of the current one, and multiprocessors are balanced.

Shape letters as in `triton_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

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

from dms_train.kernels.prefill.lists import EDGE
from dms_train.kernels.prefill.triton_attention import LOG2_E, Call

# Queries of a block, half for each computing warpgroup.
_ROWS = 128


@gluon.jit
def _load_tile(descriptor, row, column, pipe, t):
    """Copy tile t into its buffer of a ring as soon as the buffer is free."""
    ring, full, empty = pipe
    STAGES: gl.constexpr = ring.type.shape[0]
    stage = t % STAGES
    # the first round does not wait: phase 1 of a new barrier counts as complete
    mbarrier.wait(empty.index(stage), (t // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _load_slots(descriptor, table, slot, count, half, pipe, t, PAGE: gl.constexpr):
    """Load keys (half 0) or values (half 1) of slots, one page at a time."""
    ring, full, empty = pipe
    STAGES: gl.constexpr = ring.type.shape[0]
    PART: gl.constexpr = descriptor.block_type.shape[0]
    PARTS: gl.constexpr = ring.type.shape[1] // PART
    stage = t % STAGES
    mbarrier.wait(empty.index(stage), (t // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), descriptor.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        # slots after the end of the list are masked, so that any page can be read
        x = gl.minimum(slot + part * PART, count - 1)
        row = (gl.load(table + x // PAGE) * 2 + half) * PAGE + x // PART * PART % PAGE
        into = ring.index(stage).slice(part * PART, PART, 0)
        tma.async_copy_global_to_shared(descriptor, [row, 0], full.index(stage), into)


@gluon.jit
def _job(number, jobs, order, edges, sizes, BLOCK_M: gl.constexpr, EDGE: gl.constexpr):
    """Return batch row, KV head, query head, block, edge and kept tokens of job `number`."""
    heads, group, s, n, newest, window = sizes
    blocks = gl.cdiv(n, BLOCK_M)
    number = gl.minimum(number, jobs - 1)  # later numbers are prefetched but not run
    kv_list = gl.load(order + number // (blocks * group)).to(gl.int32)
    block = blocks - 1 - number % (blocks * group) // group
    edge = gl.maximum(gl.minimum(block * BLOCK_M + s - n - window, newest), 0) // EDGE
    count = gl.load(edges + kv_list * (gl.cdiv(s, EDGE) + 1) + edge)
    return kv_list // heads, kv_list % heads, number % group, block, edge * EDGE, count


@gluon.jit
def _announce(number, jobs_pipe, round):
    """Pass the job of a round to the computing warpgroups."""
    slot = jobs_pipe[0].index(round % 2)
    mbarrier.wait(jobs_pipe[2].index(round % 2), (round // 2 + 1) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot.store(gl.full([1], 0, gl.int32, layout) + number)
    mbarrier.arrive(jobs_pipe[1].index(round % 2))


@gluon.jit
def _announced(jobs_pipe, round):
    """Return the job of a round."""
    mbarrier.wait(jobs_pipe[1].index(round % 2), (round // 2) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.sum(jobs_pipe[0].index(round % 2).load(layout), 0)
    mbarrier.arrive(jobs_pipe[2].index(round % 2))
    return number


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, p_desc, q_steps, k_steps, v_steps, table, places, order, edges, jobs,
    taken, sizes, q_pipe, k_pipe, v_pipe, jobs_pipe, PAGE: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Run the loading warp: take jobs; load queries, recent tiles and tiles of kept tokens."""
    HALF: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    heads, group, s, n = sizes[0], sizes[1], sizes[2], sizes[3]
    done = 0
    round = 0
    number = gl.program_id(0)
    _announce(number, jobs_pipe, 0)
    while number < jobs:
        following = gl.atomic_add(taken, 1, sem="relaxed") + gl.num_programs(0)
        _announce(following, jobs_pipe, round + 1)
        b, h, r, block, base, count = _job(number, jobs, order, edges, sizes, 2 * HALF, EDGE)
        recent = gl.cdiv(gl.minimum((block + 1) * (2 * HALF) + s - n, s) - base, BLOCK_N)
        list_table = table + (b * heads + h) * places
        head = h * group + r
        q_row = b * q_steps[0] + head * q_steps[1] + block * (2 * HALF)
        k_row = b * k_steps[0] + h * k_steps[1] + base
        v_row = b * v_steps[0] + h * v_steps[1] + base
        for half in gl.static_range(2):
            _load_tile(q_desc, q_row + half * HALF, head * q_steps[2], q_pipe, 2 * round + half)
        for t in range(recent):
            _load_tile(k_desc, k_row + t * BLOCK_N, h * k_steps[2], k_pipe, done + t)
            _load_tile(v_desc, v_row + t * BLOCK_N, h * v_steps[2], v_pipe, done + t)
        done += recent
        for t in range(gl.cdiv(count, BLOCK_N)):
            _load_slots(p_desc, list_table, t * BLOCK_N, count, 0, k_pipe, done + t, PAGE)
            _load_slots(p_desc, list_table, t * BLOCK_N, count, 1, v_pipe, done + t, PAGE)
        done += gl.cdiv(count, BLOCK_N)
        number = following
        round += 1


@gluon.jit
def _weigh(scores, top, total, factor):
    """Compute the online softmax of one tile in powers of two: weights, shrinkage, maximum, sum."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _only_visible(scores, i, j, evicted, first, s, window):
    """Mask the scores of dense keys j by the visibility rule."""
    present = (j < s) & (j >= first)
    marked = gl.load(evicted + j, mask=present, other=1) != 0
    reach = gl.where(present, gl.where(marked, window, s), -1)
    distance = gl.expand_dims(i, 1) - gl.expand_dims(j, 0)
    visible = (distance >= 0) & (distance <= gl.expand_dims(reach, 0))
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _release(pipe, t):
    """Signal the loading warp that tile t has been read."""
    STAGES: gl.constexpr = pipe[0].type.shape[0]
    mbarrier.arrive(pipe[2].index(t % STAGES))


@gluon.jit
def _scores(q, pipe, t, blank):
    """Start the scores of tile t."""
    STAGES: gl.constexpr = pipe[0].type.shape[0]
    mbarrier.wait(pipe[1].index(t % STAGES), (t // STAGES) & 1)
    k = pipe[0].index(t % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, blank, use_acc=False, is_async=True)


@gluon.jit
def _values(weights, pipe, t, acc):
    """Start adding the weighted values of tile t."""
    STAGES: gl.constexpr = pipe[0].type.shape[0]
    mbarrier.wait(pipe[1].index(t % STAGES), (t // STAGES) & 1)
    return warpgroup_mma(weights, pipe[0].index(t % STAGES), acc, is_async=True)


@gluon.jit
def _begin(q, p, acc, k_pipe, v_pipe, t, blank):
    """Compute the scores of tile t while the values of the previous tile are being added."""
    coming = _scores(q, k_pipe, t, blank)
    adding = _values(p, v_pipe, t - 1, acc)
    scores = warpgroup_mma_wait(1, [coming])
    _release(k_pipe, t)
    return scores, adding


@gluon.jit
def _finish(scores, adding, p, top, total, factor, v_pipe, t):
    """Compute the softmax of tile t during the product in flight, then wait for the product."""
    weights, shrink, top, total = _weigh(scores, top, total, factor)
    acc, p = warpgroup_mma_wait(0, [adding, p])
    _release(v_pipe, t - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(weights.to(p.dtype), p.type.layout), acc, top, total


@gluon.jit
def _consume(
    half: gl.constexpr, out, o_strides, evicted, start, order, edges, jobs, sizes, factor,
    q_pipe, k_pipe, v_pipe, jobs_pipe, EDGE: gl.constexpr,
):  # fmt: skip
    """Run one computing warpgroup: its half of each job's queries over all tiles."""
    HALF: gl.constexpr = q_pipe[0].type.shape[1]
    D: gl.constexpr = q_pipe[0].type.shape[2]
    BLOCK_N: gl.constexpr = k_pipe[0].type.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = q_pipe[0].dtype
    heads, group, s, n, window = sizes[0], sizes[1], sizes[2], sizes[3], sizes[5]
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    blank = gl.zeros([HALF, BLOCK_N], gl.float32, S_LAYOUT)
    q = q_pipe[0].index(half)
    done = 0
    round = 0
    number = _announced(jobs_pipe, 0)
    b, h, r, block, base, count = _job(number, jobs, order, edges, sizes, 2 * HALF, EDGE)
    first = gl.load(start + b)
    while number < jobs:
        offset = block * (2 * HALF) + half * HALF
        lowest = offset + s - n
        i = lowest + gl.arange(0, HALF, ROWS)
        list_evicted = evicted + (b * heads + h).to(gl.int64) * s
        recent = gl.cdiv(gl.minimum((block + 1) * (2 * HALF) + s - n, s) - base, BLOCK_N)
        full = count // BLOCK_N
        to = out + b.to(gl.int64) * o_strides[0] + (h * group + r) * o_strides[1]
        # the next job is read early, which hides the latency
        number = _announced(jobs_pipe, round + 1)
        b, h, r, block, next_base, next_count = _job(
            number, jobs, order, edges, sizes, 2 * HALF, EDGE
        )
        next_first = gl.load(start + b)
        acc = gl.zeros([HALF, D], gl.float32, O_LAYOUT)
        top = gl.full([HALF], -1e30, gl.float32, ROWS)
        total = gl.zeros([HALF], gl.float32, ROWS)
        mbarrier.wait(q_pipe[1].index(half), round & 1)

        scores = warpgroup_mma_wait(0, [_scores(q, k_pipe, done, blank)])
        _release(k_pipe, done)
        scores = _only_visible(scores, i, base + columns, list_evicted, first, s, window)
        weights, _, top, total = _weigh(scores, top, total, factor)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        for t in range(1, recent):
            j = base + t * BLOCK_N
            scores, adding = _begin(q, p, acc, k_pipe, v_pipe, done + t, blank)
            inside = (lowest + HALF - 1 - j <= window) & (j >= first)
            if (j + BLOCK_N - 1 > lowest) | (inside == 0):
                scores = _only_visible(scores, i, j + columns, list_evicted, first, s, window)
            p, acc, top, total = _finish(scores, adding, p, top, total, factor, v_pipe, done + t)
        done += recent
        for t in range(done, done + full):
            scores, adding = _begin(q, p, acc, k_pipe, v_pipe, t, blank)
            p, acc, top, total = _finish(scores, adding, p, top, total, factor, v_pipe, t)
        done += full
        if full * BLOCK_N < count:
            scores, adding = _begin(q, p, acc, k_pipe, v_pipe, done, blank)
            held = full * BLOCK_N + columns < count
            scores = gl.where(gl.expand_dims(held, 0), scores, float("-inf"))
            p, acc, top, total = _finish(scores, adding, p, top, total, factor, v_pipe, done)
            done += 1
        mbarrier.arrive(q_pipe[2].index(half))
        adding = _values(p, v_pipe, done - 1, acc)
        acc, p = warpgroup_mma_wait(0, [adding, p])
        _release(v_pipe, done - 1)
        acc = acc / gl.convert_layout(gl.where(total == 0, 1.0, total), OUT_ROWS)[:, None]
        asked = offset + gl.arange(0, HALF, OUT_ROWS)
        channels = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        at = to + gl.expand_dims(asked.to(gl.int64) * o_strides[2], 1)
        at = at + gl.expand_dims(channels, 0)
        gl.store(at, acc.to(dtype), mask=gl.expand_dims(asked < n, 1))
        base, count, first = next_base, next_count, next_first
        round += 1


@gluon.jit
def _barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Create the barriers of a ring of COUNT buffers: one for "full", one for "read by all"."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(COUNT):
        mbarrier.init(full.index(x), count=1)
        mbarrier.init(empty.index(x), count=READERS)
    return full, empty


@gluon.jit
def _pipe(descriptor, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Create a ring of tiles with its barriers."""
    shape: gl.constexpr = descriptor.block_type.shape
    ring = gl.allocate_shared_memory(
        descriptor.dtype, [STAGES, shape[0], shape[1]], descriptor.layout
    )
    full, empty = _barriers(STAGES, READERS)
    return ring, full, empty


# lengths differ from call to call and are no reason to compile again
@gluon.jit(
    do_not_specialize=[
        "heads", "group", "s", "n", "places", "newest", "window", "jobs",
        "q_b", "q_h", "q_c", "k_b", "k_h", "k_c", "v_b", "v_h", "v_c",
    ]
)  # fmt: skip
def _attend_kernel(
    q_desc, k_desc, v_desc, p_desc, out, table, evicted, edges, start, order, taken,
    q_b, q_h, q_c, k_b, k_h, k_c, v_b, v_h, v_c, o_strides,
    heads, group, s, n, places, newest, window, jobs, factor,
    PAGE: gl.constexpr, EDGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend blocks of queries of one query head each; the longest KV lists come first."""
    q_pipe = _pipe(q_desc, 2, 1)
    k_pipe = _pipe(k_desc, STAGES, 2)
    v_pipe = _pipe(v_desc, STAGES, 2)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    known, taken_up = _barriers(2, 2)
    jobs_pipe = (numbers, known, taken_up)
    sizes = (heads, group, s, n, newest, window)
    gl.warp_specialize(
        [
            (_consume, (0, out, o_strides, evicted, start, order, edges, jobs, sizes, factor,
                        q_pipe, k_pipe, v_pipe, jobs_pipe, EDGE)),
            (_consume, (1, out, o_strides, evicted, start, order, edges, jobs, sizes, factor,
                        q_pipe, k_pipe, v_pipe, jobs_pipe, EDGE)),
            (_produce, (q_desc, k_desc, v_desc, p_desc, (q_b, q_h, q_c), (k_b, k_h, k_c),
                        (v_b, v_h, v_c), table, places, order, edges, jobs, taken, sizes,
                        q_pipe, k_pipe, v_pipe, jobs_pipe, PAGE, EDGE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _matrix(x: Tensor, rows: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """View heads x [b, h, n, d] as a matrix; return the offsets of b and h in rows and columns."""
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
    """View all pages as one matrix of slots, including pages after this tensor."""
    page, d = pages.shape[2:]
    part = [min(rows, page), d]
    layout = gl.NVMMASharedLayout.get_default_for(part, gl.bfloat16)
    return TensorDescriptor(pages, [2**31 - 1, d], [d, 1], part, layout)


class HopperPrefillTiles(NamedTuple):
    """Number of keys of a tile, and of tiles in flight or being read."""

    keys: int
    stages: int


def choose_tiles(d: int) -> HopperPrefillTiles:
    """Return the tiles for a head size, measured on an H200."""
    return HopperPrefillTiles(64, 2) if d > 128 else HopperPrefillTiles(128, 2)


def attend(call: Call, tile: HopperPrefillTiles | None = None) -> Tensor:
    """Compute the attention of `sparse.extend` on Hopper."""
    (query, key, value), chunk, pages, window, scale, _ = call
    b, hq, n, d = query.shape
    h, s = key.shape[1:3]
    keys, stages = tile or choose_tiles(d)
    out = call.empty()
    q_desc, q_steps = _matrix(query, _ROWS // 2)
    k_desc, k_steps = _matrix(key, keys)
    v_desc, v_steps = _matrix(value, keys)
    jobs = -(-n // _ROWS) * hq * b
    taken = torch.zeros(1, dtype=torch.int32, device=query.device)
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    _attend_kernel[(min(jobs, programs),)](
        q_desc, k_desc, v_desc, _slots(pages.pages, keys), out, pages.table,
        chunk.evicted.view(torch.uint8), chunk.edges, chunk.start, call.order(), taken,
        *q_steps, *k_steps, *v_steps, out.stride()[:3],
        h, hq // h, s, n, pages.table.shape[-1], s - chunk.kept, window, jobs, scale * LOG2_E.value,
        PAGE=call.page_slots, EDGE=EDGE, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
