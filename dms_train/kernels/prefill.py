"""Long prompts under hard decisions: what survives is compacted, and only that is attended.

A query reads every key of its window and, before that, the survivors. For a block of queries all
keys that left the window of its first query are old, so it reads its KV head's list of survivors
without a mask and looks at positions and decisions in the last window only. The lists are written
into pages, where they stay as the cache: a prompt may come in chunks, each of which adds to them.

    stretch = plan_chunk(evicted, carried, window)      # how long each list becomes
    ...                                                 # make room for stretch.lengths
    out, carried = extend_prompt(tokens, stretch, carried, pages, window=window, scale=scale)

Nothing here is imported from triton before it is called.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s tokens of a stretch,
p pages of the longest list, d head size. A lane is a (sequence, KV head).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.kernels import blockwise, dense
from dms_train.kernels.errors import KernelError
from dms_train.kernels.prefill_lists import EDGE, Pages, Stretch, Tokens

# Slots of a page when nobody asks for another number.
PAGE_SLOTS = 128


def attend(
    query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, *, window: int, scale: float
) -> Tensor:
    """Causal attention in which a marked key is read up to the distance `window`.

    While the GPU compacts, the host waits to learn whether anything is evicted at all: without
    evictions this is dense causal attention, and cuDNN's is taken. Workspace: room for keys and
    values once more.

    Args:
        query: [b, h * r, s, d].
        key: [b, h, s, d].
        value: Likewise.
        evicted: bool [b, h, s] by key.
        window: Distance up to which every key is read, in tokens.
        scale: Factor on the scores, above 0.

    Returns:
        [b, h * r, s, d], equal to masked dense attention but for rounding.
    """
    if not key.is_cuda or find_spec("triton") is None:
        return _in_blocks(query, key, value, evicted, window, scale)
    if key.shape[2] <= window + 1:
        return _dense(query, key, value, scale)
    none = torch.zeros(evicted.shape[:2], dtype=torch.int32, device=key.device)
    stretch = count(evicted, none)
    lengths = stretch.lengths.to("cpu", non_blocking=True)
    counted = torch.cuda.Event()
    counted.record()
    tokens, pages = Tokens(query, key, value), fresh_pages(key, key.shape[2])
    _pack(tokens, stretch, pages)
    counted.synchronize()
    mean = float(lengths.float().mean())
    if mean == key.shape[2]:
        return _dense(query, key, value, scale)
    return _attend(tokens, stretch, pages, window, scale, mean)


def count(
    evicted: Tensor,
    before: Tensor,
    *,
    kept: int = 0,
    start: Tensor | None = None,
    stop: Tensor | None = None,
) -> Stretch:
    """Say which tokens of a stretch stay, and how long the lists become.

    Args:
        evicted: bool [b, h, s] by key.
        before: int32 [b, h], length of the lists before the stretch.
        kept: The last tokens, which stay whatever was decided.
        start: int32 [b], first token that exists; None for 0.
        stop: int32 [b], one behind the last token that exists; None for s.
    """
    from dms_train.kernels import triton_pack

    b, _, s = evicted.shape
    if start is None:
        start = torch.zeros(b, dtype=torch.int32, device=evicted.device)
    if stop is None:
        stop = torch.full_like(start, s)
    evicted = evicted.contiguous()
    edges = triton_pack.count_survivors(evicted, before.contiguous(), kept, start, stop)
    return Stretch(evicted, edges, start, stop, kept)


def extend(tokens: Tokens, stretch: Stretch, pages: Pages, *, window: int, scale: float) -> Tensor:
    """Store a stretch's survivors behind the lists and let its last tokens attend.

    What the lists held before is older than the window of every query.

    Args:
        tokens: The stretch.
        stretch: Who of them stays, from `count`.
        pages: Room for `stretch.lengths` tokens, of the dtype of `tokens`.
        window: Distance up to which every key is read, in tokens.
        scale: Factor on the scores, above 0.

    Returns:
        [b, h * r, n, d]; 0 for queries before the first token or with nothing to read, finite
        nonsense for those behind the last one, provided that keys and values there are finite.

    Raises:
        KernelError: Head counts or dtypes do not fit together.
    """
    _pack(tokens, stretch, pages)
    return _attend(tokens, stretch, pages, window, scale)


class Carried(NamedTuple):
    """What one layer keeps of prompts for their next chunk, besides the pages.

    Attributes:
        lengths: int32 [b, h], slots in use. Among them are the last `window` + 1 tokens, or all if
            there are fewer.
        seen: int32 [b], tokens so far.
        evicted: bool [b, h, recent_tokens(window)] of the last tokens by key, the newest at the
            end; what is not decided yet is False.
        slots: int32, of that shape: where the last `window` + 1 tokens lie, -1 for other tokens.
            None if they are the last of their lists in their order, as a chunk leaves them.
    """

    lengths: Tensor
    seen: Tensor
    evicted: Tensor
    slots: Tensor | None = None


def recent_tokens(window: int) -> int:
    """Dense tokens that a chunk brings along from before it.

    One more than the window are needed; this many make blocks of queries, less the window, start
    at an edge.
    """
    return window + EDGE


def empty(b: int, h: int, window: int, device: torch.device) -> Carried:
    """Before the first chunk."""
    counts = torch.zeros(b, h, dtype=torch.int32, device=device)
    nobody = torch.zeros(b, h, recent_tokens(window), dtype=torch.bool, device=device)
    return Carried(counts, counts[:, 0], nobody)


def last_slots(lengths: Tensor, seen: Tensor, window: int) -> Tensor:
    """`Carried.slots` of lists that end with their last tokens."""
    places = torch.arange(-recent_tokens(window), 0, dtype=torch.int32, device=lengths.device)
    held = -places <= seen.clamp(max=window + 1)[:, None]
    return torch.where(held[:, None], lengths[..., None] + places, -1)


def plan_chunk(
    evicted: Tensor, carried: Carried, window: int, real: Tensor | None = None
) -> Stretch:
    """Who of a chunk and of the tokens before it stays; `lengths` says how much room that takes.

    Args:
        evicted: bool [b, h, recent_tokens(window) + n] by key, of the chunk and of the tokens
            before it; what is not decided yet is False.
        carried: What the chunk before this one left behind, or `empty`.
        window: Distance up to which every key is read, in tokens.
        real: int32 [b], tokens of the chunk that exist, its first ones; None for n.
    """
    recent, kept = recent_tokens(window), window + 1
    held = carried.seen.clamp(max=kept)
    stop = None if real is None else recent + real
    before = carried.lengths - held[:, None]
    return count(evicted, before, kept=kept, start=recent - held, stop=stop)


def extend_prompt(
    tokens: Tokens, stretch: Stretch, carried: Carried, pages: Pages, *, window: int, scale: float
) -> tuple[Tensor, Carried]:
    """Take the next chunk of prompts into the pages of a layer and let it attend.

    Args:
        tokens: The chunk; every token asks, so s is n.
        stretch: From `plan_chunk`.
        carried: What `plan_chunk` was given.
        pages: Room for `stretch.lengths` tokens, in which those of `carried` lie.
        window: Distance up to which every key is read, in tokens.
        scale: Factor on the scores, above 0.

    Returns:
        Output [b, h * r, n, d], and what to carry on.
    """
    from dms_train.kernels import triton_pack

    recent = recent_tokens(window)
    slots = carried.slots
    if slots is None:
        slots = last_slots(carried.lengths, carried.seen, window)
    key, value = triton_pack.read_slots(pages, slots)
    if carried.slots is not None:
        close_gaps(pages, carried.lengths, slots)
    key, value = torch.cat([key, tokens.key], 2), torch.cat([value, tokens.value], 2)
    whole = Tokens(tokens.query, key, value)
    out = extend(whole, stretch, pages, window=window, scale=scale)
    real = stretch.stop - recent
    places = real[:, None, None] + torch.arange(recent, device=key.device)
    evicted = stretch.evicted.gather(2, places.expand(*stretch.evicted.shape[:2], -1))
    return out, Carried(stretch.lengths, carried.seen + real, evicted)


def close_gaps(pages: Pages, lengths: Tensor, leaving: Tensor) -> None:
    """Move the last tokens of each list into the slots of those that leave it.

    Args:
        pages: Where the lists lie.
        lengths: int32 [b, h], before.
        leaving: int32 [b, h, k], slots of tokens that leave, -1 for none.
    """
    from dms_train.kernels import triton_pack

    k = leaving.shape[-1]
    gone = (leaving >= 0).sum(-1, keepdim=True)
    cut = lengths[..., None] - gone  # length afterwards
    hole = (leaving >= 0) & (leaving < cut)
    in_tail = leaving >= cut
    place = torch.where(in_tail, leaving - cut, k).long()
    leaves = torch.zeros(*leaving.shape[:2], k + 1, dtype=torch.bool, device=leaving.device)
    leaves = leaves.scatter(2, place, torch.ones_like(in_tail))[..., :k]
    tail = torch.arange(k, dtype=torch.int32, device=leaving.device)
    source = torch.where(~leaves & (tail < gone), cut + tail, -1)
    # as many tokens move as there are holes: both lists, in order, from the front
    source = source.gather(2, (source < 0).int().argsort(dim=-1, stable=True)).int()
    target = torch.where(hole, leaving, -1)
    target = target.gather(2, (target < 0).int().argsort(dim=-1, stable=True))
    triton_pack.write_slots(pages, target, *triton_pack.read_slots(pages, source))


def fresh_pages(like: Tensor, slots: int, page_slots: int = PAGE_SLOTS) -> Pages:
    """Pages of their own for `slots` tokens of each lane of `like` [b, h, any, d]."""
    b, h, _, d = like.shape
    places = max(1, -(-slots // page_slots))
    pages = like.new_empty(b * h * places, 2, page_slots, d)
    numbers = torch.arange(b * h * places, dtype=torch.int32, device=like.device)
    return Pages(pages, numbers.view(b, h, places))


def _check(tokens: Tokens, pages: Pages) -> None:
    query, key, _ = tokens
    if query.shape[1] % key.shape[1]:
        raise KernelError(f"{query.shape[1]} query heads for {key.shape[1]} KV heads")
    dtypes = {x.dtype for x in (*tokens, pages.pages)}
    if len(dtypes) > 1:
        raise KernelError(f"query, key, value and pages differ in dtype: {dtypes}")
    slots = pages.pages.shape[2]
    if slots & (slots - 1):
        raise KernelError(f"page_slots={slots}: a power of two")


def _pack(tokens: Tokens, stretch: Stretch, pages: Pages) -> None:
    from dms_train.kernels import triton_pack

    _check(tokens, pages)
    triton_pack.pack_survivors(tokens.key, tokens.value, stretch, pages)


def _attend(
    tokens: Tokens,
    stretch: Stretch,
    pages: Pages,
    window: int,
    scale: float,
    mean_length: float | None = None,
) -> Tensor:
    from dms_train.kernels import triton_prefill

    call = triton_prefill.Call(tokens, stretch, pages, window, scale, mean_length)
    if triton_prefill.suits_hopper(call):
        from dms_train.kernels import triton_prefill_hopper

        return triton_prefill_hopper.attend(call)
    return triton_prefill.attend(call)


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return dense.causal_attention(q, k, v, scale).transpose(1, 2)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, window: int, scale: float
) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    log_keep = torch.zeros(evicted.shape, dtype=wide, device=evicted.device)
    log_keep = log_keep.masked_fill(evicted, float("-inf"))
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    return blockwise.dms_attention(q, k, v, log_keep, window, scale).transpose(1, 2)
