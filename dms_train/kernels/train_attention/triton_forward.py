"""Forward pass of causal attention with a soft eviction bias, and the lists of key blocks it reads.

Queries come in tiles of BLOCK_M rows, keys in tiles of BLOCK_N. For a tile of queries, a tile of
keys is *old* when every key has left the window of every query. Its bias is then one number per
column, and nothing is masked. A list names the old tiles with at least one key that is not evicted
for good; the others are skipped. Tiles near the diagonal are masked element by element.

Exponentials are powers of two: scores and biases carry the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["length", "n_blocks"])
def prepare_bias(
    log_keep, bias, blocks, counts, length, n_blocks, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Compute biases in powers of two, and list the tiles of keys that may still be read.

    Args:
        log_keep: float32 [rows, length], one row per sample and KV head.
        bias: float32 [rows, n_blocks * BLOCK], zeros after the end.
        blocks: int32 [rows, n_blocks], numbers of the live tiles.
        counts: int32 [rows, n_blocks + 1], live tiles before each tile.
        length: Number of keys.
        n_blocks: Number of tiles.
        BLOCK: Keys of a tile.
        N: n_blocks rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, N)
    live = tl.zeros([N], tl.int32)
    for offset in range(0, BLOCK, 16):
        key = number[:, None] * BLOCK + offset + tl.arange(0, 16)[None, :]
        value = tl.load(log_keep + row * length + key, mask=key < length, other=float("-inf"))
        live = tl.maximum(live, tl.max((value != float("-inf")).to(tl.int32), 1))
        value = tl.where(key < length, value * LOG2E, 0.0)
        tl.store(bias + row * n_blocks * BLOCK + key, value, mask=number[:, None] < n_blocks)
    before = tl.cumsum(live, 0) - live
    tl.store(blocks + row * n_blocks + before, number, mask=(live > 0) & (number < n_blocks))
    tl.store(counts + row * (n_blocks + 1) + number, before, mask=number < n_blocks)
    tl.store(counts + row * (n_blocks + 1) + n_blocks, tl.sum(live, 0))


@triton.jit
def _online_softmax(scores, v, acc, peak, total, PRECISION: tl.constexpr):
    """Add one tile of keys to the running output, row maximum and row sum."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # a row that has seen no visible key yet must not compute inf - inf
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.math.exp2(scores - base[:, None])
    fade = tl.math.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def load_rows(desc, sample, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows first .. first + ROWS - 1 of [b, h, s, d]; zeros after the end."""
    return desc.load([sample, head, first, 0]).reshape([ROWS, D])


@triton.jit
def place_of(n_tiles, pairs, members, section):
    """Return the tile (0 runs first), pair and member of this program.

    Pairs are pairs of sample and KV head. `section` pairs run concurrently, as many as fit the
    second-level cache. In a section, the first tiles of all members of all pairs run first.
    """
    program = tl.program_id(0)
    start = program // (section * n_tiles * members) * section
    width = tl.minimum(section, pairs - start) * members
    rank = program - start * n_tiles * members
    return rank // width, start + rank % width // members, rank % width % members


@triton.jit(
    do_not_specialize=["length", "padded", "n_blocks", "window", "section", "n_heads", "group"]
)
def attend(
    q_desc, k_desc, v_desc, o_desc, bias, lse, blocks, counts, starts,
    scale, length, padded, n_blocks, window, section,
    n_heads, group, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one tile of queries of one head.

    Descriptors are [b, h, s, d]; bias, blocks and counts come from `prepare_bias`. lse is float32
    [b, h, padded], log2 of the sum of exponentials, +inf after the end. starts is int32 [s], the
    first position of each query's document.
    """
    n_tiles = tl.cdiv(length, BLOCK_M)
    kv_heads = n_heads // group
    pairs = tl.num_programs(0) // (n_tiles * group)
    # the longest tiles first; heads of a group are adjacent, because they read the same keys
    rank, pair, member = place_of(n_tiles, pairs, group, section)
    first = (n_tiles - 1 - rank) * BLOCK_M
    sample, kv_head = pair // kv_heads, pair % kv_heads
    head = kv_head * group + member
    pair = pair.to(tl.int64)
    bias += pair * n_blocks * BLOCK_N
    blocks += pair * n_blocks
    counts += pair * (n_blocks + 1)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    q = load_rows(q_desc, sample, head, first, BLOCK_M, D)
    factor = scale * LOG2E
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    begin, open_from = 0, 0
    row_start = tl.zeros([BLOCK_M], tl.int32)
    if PACKED:
        row_start = tl.load(starts + rows, mask=rows < length, other=length)
        begin = tl.load(starts + first) // BLOCK_N * BLOCK_N
        last = tl.minimum(first + BLOCK_M, length) - 1
        open_from = tl.cdiv(tl.load(starts + last), BLOCK_N) * BLOCK_N
    end = tl.minimum(first + BLOCK_M, length)
    edge = tl.maximum(first - window, 0) // BLOCK_N * BLOCK_N
    open_from = tl.minimum(open_from, edge)
    near = tl.maximum(edge, begin)

    live_from = tl.load(counts + open_from // BLOCK_N)
    live_to = tl.load(counts + edge // BLOCK_N)
    for entry in tl.range(live_from, live_to, num_stages=STAGES):
        key = tl.load(blocks + entry) * BLOCK_N
        k = load_rows(k_desc, sample, kv_head, key, BLOCK_N, D)
        column_bias = tl.load(bias + key + columns)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * factor + column_bias[None, :]
        v = load_rows(v_desc, sample, kv_head, key, BLOCK_N, D)
        acc, peak, total = _online_softmax(scores, v, acc, peak, total, PRECISION)

    # masked tiles: first keys of a document, then from the window's edge up to the diagonal
    n_head = tl.maximum(open_from - begin, 0) // BLOCK_N
    n_masked = n_head + tl.cdiv(end - near, BLOCK_N)
    for number in tl.range(0, n_masked, num_stages=STAGES):
        key = near + (number - n_head) * BLOCK_N
        if PACKED:
            key = tl.where(number < n_head, begin + number * BLOCK_N, key)
        keys = key + columns
        k = load_rows(k_desc, sample, kv_head, key, BLOCK_N, D)
        column_bias = tl.load(bias + keys)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * factor
        distance = rows[:, None] - keys[None, :]
        scores += tl.where(distance > window, column_bias[None, :], 0.0)
        seen = distance >= 0
        if PACKED:
            seen = seen & (keys[None, :] >= row_start[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        v = load_rows(v_desc, sample, kv_head, key, BLOCK_N, D)
        acc, peak, total = _online_softmax(scores, v, acc, peak, total, PRECISION)

    o = acc / total[:, None]
    o_desc.store([sample, head, first, 0], o.to(o_desc.dtype).reshape([1, 1, BLOCK_M, D]))
    value = tl.where(rows < length, peak + tl.math.log2(total), float("inf"))
    lse_row = (sample * n_heads + head).to(tl.int64) * padded
    tl.store(lse + lse_row + rows, value, mask=rows < padded)
