"""Backward pass of causal attention with a soft eviction bias.

A program handles a tile of BLOCK_N keys and loops over the queries that read it, one head of a
query group after the other. Gradients of keys, values and log_keep stay in registers. The gradient
of the queries is added to memory tile by tile. A deterministic alternative is a separate kernel,
which always sums in the same order. With p = softmax weights, dp_ij = d_o_i . v_j and delta_i =
d_o_i . o_i:

    ds_ij = p_ij (dp_ij - delta_i)
    d_log_keep_j = sum of ds_ij over the queries whose window key j has left

Tiles of scores are held transposed, [keys, queries]. Exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dms_train.kernels.train_attention.triton_forward import LOG2E, load_rows, place_of


@triton.jit(do_not_specialize=["length", "padded", "n_heads"])
def row_dots(
    o_desc, d_o_desc, delta, length, padded,
    n_heads, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute delta [b, h, padded] = sum over d of o * d_o, both [b, h, s, d]; then zeros."""
    pair = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    o = load_rows(o_desc, pair // n_heads, pair % n_heads, first, BLOCK, D).to(tl.float32)
    d_o = load_rows(d_o_desc, pair // n_heads, pair % n_heads, first, BLOCK, D).to(tl.float32)
    rows = first + tl.arange(0, BLOCK)
    tl.store(delta + pair.to(tl.int64) * padded + rows, tl.sum(o * d_o, 1), mask=rows < padded)


@triton.jit(do_not_specialize=["length", "n_heads"])
def finish_dq(
    sums, dq, scale, length, sums_h, sums_s, sums_d, stride_b, stride_s, stride_h,
    n_heads, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dq [b, s, h, d] = scale * sums, float32 [b * h, ., .] with the strides sums_*."""
    pair = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, D)
    inside = (rows[:, None] < length) & (channels[None, :] < SIZE)
    at = pair.to(tl.int64) * sums_h + rows[:, None] * sums_s + channels[None, :] * sums_d
    values = tl.load(sums + at, mask=inside, other=0.0) * scale
    out = (pair // n_heads).to(tl.int64) * stride_b + (pair % n_heads) * stride_h
    out += rows[:, None].to(tl.int64) * stride_s + channels[None, :]
    tl.store(dq + out, values.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    desc, d_o_desc, lse, delta, sample, head, query, padded,
    n_heads, BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Load queries, output gradients, lse and delta of BLOCK_M rows from `query` on."""
    rows = (sample * n_heads + head).to(tl.int64) * padded + query + tl.arange(0, BLOCK_M)
    q = load_rows(desc, sample, head, query, BLOCK_M, D)
    d_o = load_rows(d_o_desc, sample, head, query, BLOCK_M, D)
    return q, d_o, tl.load(lse + rows), tl.load(delta + rows)


@triton.jit
def _add_columns(
    desc, base, values, sample, head, first, padded,
    n_heads, SIZE: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Add values [D, columns] to float32 [b, h, SIZE, padded]; BULK copies through `desc`."""
    D: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    if BULK:
        desc.atomic_add([sample, head, 0, first], values.reshape([1, 1, D, COLUMNS]))
    else:
        channels = tl.arange(0, D)[:, None]
        columns = first + tl.arange(0, COLUMNS)[None, :]
        at = ((sample * n_heads + head).to(tl.int64) * SIZE + channels) * padded + columns
        tl.atomic_add(base + at, values, mask=channels < SIZE, sem="relaxed")


@triton.jit(
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
    q_desc, k_desc, v_desc, d_o_desc, dq_desc, dk_desc, dv_desc, dq,
    bias, d_log_keep, lse, delta, counts, ends, scale, length, padded, n_blocks, window, section,
    n_heads, group, per_program, D: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LIST_BLOCK: tl.constexpr,
    PACKED: tl.constexpr, DQ: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys from per_program query heads.

    dk and dv are [b, h / per_program, s, d], d_log_keep is float32 [b, h / per_program, s]. With
    DQ, the kernel adds to dq, float32 [b, h, SIZE, padded] without the factor `scale`. It writes
    through dq_desc (BULK) or the address. ends is int32 [s], the end of each key's document.
    """
    kv_heads = n_heads // group
    members = group // per_program
    n_tiles = tl.cdiv(length, BLOCK_N)
    # most queries read the first keys: their programs start first
    rank, pair, member = place_of(
        n_tiles, tl.num_programs(0) // (n_tiles * members), members, section
    )
    first = rank * BLOCK_N
    sample, kv_head = pair // kv_heads, pair % kv_heads
    part = kv_head * members + member
    pair = pair.to(tl.int64)
    keys = first + tl.arange(0, BLOCK_N)
    factor = scale * LOG2E
    k = load_rows(k_desc, sample, kv_head, first, BLOCK_N, D)
    v = load_rows(v_desc, sample, kv_head, first, BLOCK_N, D)
    inside = keys < n_blocks * LIST_BLOCK
    key_bias = tl.load(bias + pair * n_blocks * LIST_BLOCK + keys, mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    d_bias = tl.zeros([BLOCK_N], tl.float32)

    end, open_to = length, length
    key_end = keys
    if PACKED:
        key_end = tl.load(ends + keys, mask=keys < length, other=0)
        end = tl.load(ends + tl.minimum(first + BLOCK_N, length) - 1)
        open_to = tl.load(ends + first)
    begin = first // BLOCK_M * BLOCK_M
    old = tl.cdiv(first + BLOCK_N + window, BLOCK_M) * BLOCK_M
    counts += pair * (n_blocks + 1)
    live_before = tl.load(counts + first // LIST_BLOCK)
    live_after = tl.load(counts + tl.minimum(tl.cdiv(first + BLOCK_N, LIST_BLOCK), n_blocks))
    if live_before == live_after:  # all evicted: no query outside the window reads these keys
        end = tl.minimum(end, old)
    n_near = tl.cdiv(tl.minimum(old, end) - begin, BLOCK_M)
    n_old, tail, n_masked = tl.cdiv(tl.maximum(end - old, 0), BLOCK_M), 0, n_near
    if PACKED:  # queries of the next document share the last tile, or more, with this one's
        n_old = tl.maximum(tl.minimum(open_to, end) - old, 0) // BLOCK_M
        tail = old + n_old * BLOCK_M
        n_masked += tl.cdiv(tl.maximum(end - tail, 0), BLOCK_M)

    for step in tl.range(0, per_program * n_masked, num_stages=STAGES):
        head = part * per_program + step // n_masked
        number = step % n_masked
        query = begin + number * BLOCK_M
        if PACKED:
            query = tl.where(number < n_near, query, tail + (number - n_near) * BLOCK_M)
        q, d_o, row_lse, row_delta = _tile(
            q_desc, d_o_desc, lse, delta, sample, head, query, padded, n_heads, BLOCK_M, D
        )
        rows = query + tl.arange(0, BLOCK_M)
        distance = rows[None, :] - keys[:, None]
        late = distance > window
        seen = distance >= 0
        if PACKED:
            seen = seen & (rows[None, :] < key_end[:, None])
        scores = tl.dot(k, q.T, input_precision=PRECISION) * factor
        scores += tl.where(late, key_bias[:, None], 0.0)
        weights = tl.where(seen, tl.math.exp2(scores - row_lse[None, :]), 0.0)
        d_weights = tl.dot(v, d_o.T, input_precision=PRECISION)
        dv = tl.dot(weights.to(d_o.dtype), d_o, dv, input_precision=PRECISION)
        ds = weights * (d_weights - row_delta[None, :])
        d_bias += tl.sum(tl.where(late, ds, 0.0), 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if DQ:
            columns = tl.dot(k.T, ds.to(q.dtype), input_precision=PRECISION)
            _add_columns(dq_desc, dq, columns, sample, head, query, padded, n_heads, SIZE, BULK)

    for step in tl.range(0, per_program * n_old, num_stages=STAGES):
        head = part * per_program + step // n_old
        query = old + step % n_old * BLOCK_M
        q, d_o, row_lse, row_delta = _tile(
            q_desc, d_o_desc, lse, delta, sample, head, query, padded, n_heads, BLOCK_M, D
        )
        scores = tl.dot(k, q.T, input_precision=PRECISION) * factor + key_bias[:, None]
        weights = tl.math.exp2(scores - row_lse[None, :])
        d_weights = tl.dot(v, d_o.T, input_precision=PRECISION)
        dv = tl.dot(weights.to(d_o.dtype), d_o, dv, input_precision=PRECISION)
        ds = weights * (d_weights - row_delta[None, :])
        d_bias += tl.sum(ds, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if DQ:
            columns = tl.dot(k.T, ds.to(q.dtype), input_precision=PRECISION)
            _add_columns(dq_desc, dq, columns, sample, head, query, padded, n_heads, SIZE, BULK)

    at = [sample, part, first, 0]
    dk_desc.store(at, (dk * scale).to(dk_desc.dtype).reshape([1, 1, BLOCK_N, D]))
    dv_desc.store(at, dv.to(dv_desc.dtype).reshape([1, 1, BLOCK_N, D]))
    out_row = (sample * kv_heads * members + part).to(tl.int64) * length
    tl.store(d_log_keep + out_row + keys, d_bias, mask=keys < length)


@triton.jit(
    do_not_specialize=["length", "padded", "n_blocks", "window", "section", "n_heads", "group"]
)
def query_gradient(
    q_desc, k_desc, v_desc, d_o_desc, dq_desc, bias, lse, delta, blocks, counts, starts,
    scale, length, padded, n_blocks, window, section,
    n_heads, group, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of queries, summed in the order of the keys."""
    n_tiles = tl.cdiv(length, BLOCK_M)
    kv_heads = n_heads // group
    pairs = tl.num_programs(0) // (n_tiles * group)
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
    factor = scale * LOG2E
    q, d_o, row_lse, row_delta = _tile(
        q_desc, d_o_desc, lse, delta, sample, head, first, padded, n_heads, BLOCK_M, D
    )
    dq = tl.zeros([BLOCK_M, D], tl.float32)

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
        v = load_rows(v_desc, sample, kv_head, key, BLOCK_N, D)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * factor
        scores += tl.load(bias + key + columns)[None, :]
        weights = tl.math.exp2(scores - row_lse[:, None])
        ds = weights * (tl.dot(d_o, v.T, input_precision=PRECISION) - row_delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    n_head = tl.maximum(open_from - begin, 0) // BLOCK_N
    n_masked = n_head + tl.cdiv(end - near, BLOCK_N)
    for number in tl.range(0, n_masked, num_stages=STAGES):
        key = near + (number - n_head) * BLOCK_N
        if PACKED:
            key = tl.where(number < n_head, begin + number * BLOCK_N, key)
        keys = key + columns
        k = load_rows(k_desc, sample, kv_head, key, BLOCK_N, D)
        v = load_rows(v_desc, sample, kv_head, key, BLOCK_N, D)
        distance = rows[:, None] - keys[None, :]
        seen = distance >= 0
        if PACKED:
            seen = seen & (keys[None, :] >= row_start[:, None])
        scores = tl.dot(q, k.T, input_precision=PRECISION) * factor
        scores += tl.where(distance > window, tl.load(bias + keys)[None, :], 0.0)
        weights = tl.where(seen, tl.math.exp2(scores - row_lse[:, None]), 0.0)
        ds = weights * (tl.dot(d_o, v.T, input_precision=PRECISION) - row_delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    values = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([sample, head, first, 0], values.reshape([1, 1, BLOCK_M, D]))
