"""Attention of long prompts with hard decisions over the kept tokens only.

A query reads every key in its window and the kept keys before it. For a block of queries, all keys
outside the window of its first query are old. The block reads its KV head's list of old kept tokens
without a mask. It needs positions and decisions for the last window only. The lists are written
into pages and are the cache: a prompt may come in chunks, and each chunk extends the lists.

    chunk = plan_chunk(evicted, state, window)  # how long each list becomes
    ...                                         # allocate pages for chunk.lengths
    out = extend_prompt(tokens, chunk, state, pages, window=window, scale=scale)
    state = state_after(chunk, state, window)

Triton is imported on first use.

Shape letters: b sequences, h KV heads, r query heads per KV head, n queries, s tokens of a chunk,
p pages of the longest list, d head size. A KV list is one (sequence, KV head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.errors import KernelError
from dms_train.kernels.prefill.lists import (
    Pages,
    PrefillChunk,
    PrefillState,
    Tokens,
    recent_tokens,
)
from dms_train.kernels.train_attention.dense import causal_attention

# Default number of slots of a page.
PAGE_SLOTS = 128


def count(
    evicted: Tensor,
    before: Tensor,
    *,
    kept: int = 0,
    start: Tensor | None = None,
    stop: Tensor | None = None,
) -> PrefillChunk:
    """Count which tokens of a chunk are kept, and how long the lists become.

    Args:
        evicted: bool [b, h, s] by key.
        before: int32 [b, h], length of the lists before the chunk.
        kept: Number of last tokens that are kept regardless of decisions.
        start: int32 [b], first token that exists; None for 0.
        stop: int32 [b], one after the last token that exists; None for s.
    """
    from dms_train.kernels.prefill import triton_pack

    b, _, s = evicted.shape
    if start is None:
        start = torch.zeros(b, dtype=torch.int32, device=evicted.device)
    if stop is None:
        stop = torch.full_like(start, s)
    evicted = evicted.contiguous()
    edges, after = triton_pack.count_survivors(evicted, before.contiguous(), kept, start, stop)
    return PrefillChunk(evicted, edges, after, start, stop, kept)


def extend(
    tokens: Tokens,
    chunk: PrefillChunk,
    pages: Pages,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Append a chunk's kept tokens to the lists and compute attention of its last tokens.

    Tokens already in the lists are older than the window of every query.

    Args:
        tokens: The chunk.
        chunk: From `count`.
        pages: At least `chunk.lengths` slots, of the dtype of `tokens`.
        window: Distance up to which every key is read, in tokens.
        scale: Factor on the scores, above 0.
        sinks: Logits [h * r] in the denominators of the heads; None for none.

    Returns:
        [b, h * r, n, d]; 0 for queries before the first token or without a key to read. Outputs
        after the last token are unspecified; they are finite if the keys and values there are
        finite.

    Raises:
        KernelError: Head counts or dtypes do not fit together.
    """
    _pack(tokens, chunk, pages)
    return _attend(tokens, chunk, pages, window, scale, sinks)


def empty(b: int, h: int, window: int, device: torch.device) -> PrefillState:
    """Return the state before the first chunk."""
    counts = torch.zeros(b, h, dtype=torch.int32, device=device)
    none = torch.zeros(b, h, recent_tokens(window), dtype=torch.bool, device=device)
    return PrefillState(counts, counts[:, 0].contiguous(), none)


def last_slots(lengths: Tensor, seen: Tensor, window: int) -> Tensor:
    """Return `PrefillState.slots` of lists that end with their last tokens."""
    offsets = torch.arange(-recent_tokens(window), 0, dtype=torch.int32, device=lengths.device)
    held = -offsets <= seen.clamp(max=window + 1)[:, None]
    return torch.where(held[:, None], lengths[..., None] + offsets, -1)


def plan_chunk(evicted: Tensor, state: PrefillState, window: int) -> PrefillChunk:
    """Count the kept tokens of a chunk.

    Args:
        evicted: bool [b, h, recent_tokens(window) + n] by key, of the tokens before the chunk and
            of the chunk. Undecided tokens are False.
        state: State before the chunk.
        window: Distance up to which every key is read, in tokens.
    """
    held = state.seen.clamp(max=window + 1)
    before, start = state.lengths - held[:, None], recent_tokens(window) - held
    return count(evicted, before, kept=window + 1, start=start)


def extend_prompt(
    tokens: Tokens,
    chunk: PrefillChunk,
    state: PrefillState,
    pages: Pages,
    *,
    window: int,
    scale: float,
    evicts: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store a chunk and compute its attention; see `PrefillKernels.extend_prompt`."""
    from dms_train.kernels.prefill import triton_pack, triton_state

    if state.evicted.shape[-1] == 0:
        if evicts or sinks is not None:
            return extend(tokens, chunk, pages, window=window, scale=scale, sinks=sinks)
        _pack(tokens, chunk, pages)
        query, key, value = (x.transpose(1, 2) for x in tokens)
        return causal_attention(query, key, value, scale).transpose(1, 2)
    slots = state.slots
    if slots is None:
        slots = last_slots(state.lengths, state.seen, window)
    key, value = triton_pack.join_tokens(pages, slots, tokens.key, tokens.value)
    if evicts and state.slots is not None:
        triton_state.close_gaps(pages, state.lengths, slots)
    whole = Tokens(tokens.query, key, value)
    return extend(whole, chunk, pages, window=window, scale=scale, sinks=sinks)


def state_after(chunk: PrefillChunk, state: PrefillState, window: int) -> PrefillState:
    """Return the state after a chunk.

    Args:
        chunk: From `plan_chunk`.
        state: State before the chunk.
        window: Distance up to which every key is read, in tokens.
    """
    recent, evicted, real = recent_tokens(window), chunk.evicted, chunk.stop
    if state.evicted.shape[-1] == 0:
        evicted = F.pad(evicted, (recent, 0))
    else:
        real = real - recent
    index = real[:, None, None] + torch.arange(recent, device=evicted.device)
    last = evicted.gather(2, index.expand(*evicted.shape[:2], -1))
    return PrefillState(chunk.lengths, state.seen + real, last)


def fresh_pages(like: Tensor, slots: int, page_slots: int = PAGE_SLOTS) -> Pages:
    """Allocate pages for `slots` tokens of each KV list of `like` [b, h, any, d]."""
    b, h, _, d = like.shape
    num_pages = max(1, -(-slots // page_slots))
    pages = like.new_empty(b * h * num_pages, 2, page_slots, d)
    numbers = torch.arange(b * h * num_pages, dtype=torch.int32, device=like.device)
    return Pages(pages, numbers.view(b, h, num_pages))


def _check(tokens: Tokens, pages: Pages) -> None:
    query, key, _ = tokens
    if query.shape[1] % key.shape[1]:
        raise KernelError(
            f"{query.shape[1]} query heads for {key.shape[1]} KV heads: must be a multiple"
        )
    dtypes = {x.dtype for x in (*tokens, pages.pages)}
    if len(dtypes) > 1:
        raise KernelError(f"query, key, value and pages have dtypes {dtypes}: must be one dtype")
    slots = pages.pages.shape[2]
    if slots & (slots - 1):
        raise KernelError(f"page_slots={slots}: must be a power of two")


def _pack(tokens: Tokens, chunk: PrefillChunk, pages: Pages) -> None:
    from dms_train.kernels.prefill import triton_pack

    _check(tokens, pages)
    triton_pack.pack_survivors(tokens.key, tokens.value, chunk, pages)


def _attend(
    tokens: Tokens,
    chunk: PrefillChunk,
    pages: Pages,
    window: int,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    from dms_train.kernels.prefill import triton_attention as triton_prefill

    call = triton_prefill.Call(tokens, chunk, pages, window, scale, sinks)
    if triton_prefill.is_supported_on_hopper(call):
        from dms_train.kernels.prefill import triton_hopper as triton_prefill_hopper

        return triton_prefill_hopper.attend(call)
    return triton_prefill.attend(call)
