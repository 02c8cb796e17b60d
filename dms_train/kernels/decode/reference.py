"""Decode attention over compact pages in plain loops and float64.

Implementation of `dispatch.PagedAttention` on any device, and reference for tests of the kernels.
`choose` is the reference of the kernel with that name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dms_train.kernels.decode.types import (
    ALWAYS,
    CHOSEN,
    DECAYED,
    FP8,
    LIST_FULL,
    MAXIMUM,
    MEAN,
    NEVER,
    OLDEST,
    OUT_OF_PAGES,
    SUMMED,
    AttentionTuning,
    AttentionWorkspace,
    Choice,
    Decisions,
    HeadNorms,
    PagedCache,
    SlotLogits,
    Step,
)
from dms_train.kernels.sinks import softmax


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [..., d] in float64; cos and sin broadcast to it."""
    first, second = x.double().chunk(2, -1)
    return x.double() * cos.double() + torch.cat([-second, first], -1) * sin.double()


def append(
    step: Step,
    cache: PagedCache,
    rule: Decisions,
    *,
    norms: HeadNorms | None = None,
    rotated: Tensor | None = None,
) -> Tensor:
    """Evict the token that leaves the window if it is marked, then store one token.

    Works like `PagedAttention.append`, except that a new result is float64.
    """
    b, heads, d = step.query.shape
    h = step.key.shape[1]
    query, key = step.query.double(), step.key.double()
    if norms is not None:
        query = _normalise(query, norms.query, norms.epsilon)
        key = _normalise(key, norms.key, norms.epsilon)
    query = query.reshape(b, h, heads // h, d).clone()
    activation = query[:, :, 0, rule.channel].float()
    marks = activation * rule.scale - rule.offset > 0 if step.signal is None else step.signal
    if rule.clear:
        query[:, :, 0, rule.channel] = 0
    query = rotate(query, step.cos[:, None, None], step.sin[:, None, None])
    if rule.clear_after_rope:
        query[:, :, 0, rule.channel] = 0
    key = rotate(key, step.cos[:, None], step.sin[:, None])
    for i, row in enumerate(step.rows.tolist()):
        for head in range(h if row >= 0 else 0):
            marked = rule.source == ALWAYS or (rule.source != CHOSEN and bool(marks[i, head]))
            claim = _claim(cache, row, head, (int(step.position[i]), marked), rule)
            if claim is not None:
                _store(cache, row, head, claim, torch.stack([key[i, head], step.value[i, head]]))
                if cache.positions is not None:
                    cache.positions[row, head, claim[0]] = int(step.position[i])
                if cache.bounds is not None:
                    _bound(cache, row, head, claim[0])
    query = query.view(b, heads, d)
    return query if rotated is None else rotated.copy_(query)


def _normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply RMSNorm over the last dimension, in float64."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()


def _claim(
    cache: PagedCache, row: int, head: int, token: tuple[int, bool], rule: Decisions
) -> tuple[int, bool] | None:
    """Evict the leaving token if marked. Returns a slot for `token` and whether it is a new slot.

    Args:
        cache: Updated.
        row: Cache row.
        head: KV head.
        token: Position of the arriving token, and its decision.
        rule: Source of the decisions.
    """
    (t, marked), ring, length = token, cache.ring[row, head], int(cache.lengths[row, head])
    size, evicts, slot = len(ring), False, length
    if rule.source != NEVER:
        if 0 < rule.shift <= min(t, size) and marked:
            ring[(t - rule.shift) % size] |= 1
        leaving = int(ring[t % size])
        evicts = t >= size and leaving % 2 == 1
        slot = leaving // 2 if evicts else length
    if not evicts and not _reserve_slot(cache, row, head, slot):
        return None
    if (evicts or slot % cache.page_slots) and not _own_page(cache, row, head, slot):
        return None
    cache.lengths[row, head] = length + (not evicts)
    if rule.source != NEVER:
        ring[t % size] = 2 * slot + (rule.shift == 0 and marked)
    return slot, not evicts


def _reserve_slot(cache: PagedCache, row: int, head: int, slot: int) -> bool:
    """Give the KV list a page for its next slot if it has none; False if that is impossible."""
    page_index, free = slot // cache.page_slots, cache.free
    if page_index >= cache.table.shape[-1]:
        free.fault.bitwise_or_(LIST_FULL)
        return False
    if slot % cache.page_slots:
        return True
    page = _pop(cache)
    cache.table[row, head, page_index] = page
    return page > 0


def _own_page(cache: PagedCache, row: int, head: int, slot: int) -> bool:
    """Copy the page of a slot if another KV list holds it too; False if there is no page for it."""
    entry = cache.table[row, head, slot // cache.page_slots]
    holders = cache.free.holders
    if holders is None or holders[entry] == 1:
        return True
    page = _pop(cache)
    if page:
        cache.pages[page] = cache.pages[entry]
        holders[entry] -= 1
        entry.fill_(page)
    return page > 0


def _pop(cache: PagedCache) -> int:
    """Pop a free page; 0 if there is none."""
    free = cache.free
    free.left.sub_(1)
    left = int(free.left)
    if left < 0:
        free.fault.bitwise_or_(OUT_OF_PAGES)
        return 0
    return int(free.numbers[left])


def _store(cache: PagedCache, row: int, head: int, claim: tuple[int, bool], pair: Tensor) -> None:
    """Write key and value [2, d] into a claimed slot."""
    page_index, offset = divmod(claim[0], cache.page_slots)
    page = cache.pages[int(cache.table[row, head, page_index])]
    fresh = claim[1] and offset == 0
    for kind in range(2):
        wide = pair[kind].double()
        if cache.exponents is not None:
            scale = cache.exponents[row, head, page_index]
            _fit_exponent(page[kind], scale[kind], wide, fresh=fresh)
            wide = wide * 2.0 ** -float(scale[kind])
        page[kind, offset] = wide.float().to(page.dtype)


def _bound(cache: PagedCache, row: int, head: int, slot: int) -> None:
    """Write minimum and maximum keys of the page whose last token lies in a slot."""
    assert cache.bounds is not None
    page = cache.table[row, head, slot // cache.page_slots]
    keys = cache.pages[page, 0, : slot % cache.page_slots + 1]
    cache.bounds[page] = torch.stack([keys.amin(0), keys.amax(0)])


def _fit_exponent(page: Tensor, exponent: Tensor, wide: Tensor, *, fresh: bool) -> None:
    """Raise a page's exponent until `wide` [d] fits, shifting what is stored; in place.

    Values are kept at or below 256 of e4m3's 448. A page starts, and is raised, with one power of
    two to spare, so that raises are rare. A raise is exact, except for values that fall below
    2**-6.
    """
    peak = wide.abs().max()
    need = min(max(int(torch.frexp(peak)[1]) - 8, -100), 100) if peak > 0 else -100
    if fresh:
        exponent.fill_(need + 1)
    elif need > int(exponent):
        page.copy_((page.float() * 2.0 ** (int(exponent) - need - 1)).to(page.dtype))
        exponent.fill_(need + 1)


def attention_workspace(
    query: Tensor,
    cache: PagedCache,
    tuning: AttentionTuning | None = None,
    *,
    evicts: bool = False,
) -> AttentionWorkspace:
    """Return an empty workspace; `attend` needs no scratch memory."""
    none = query.new_empty(0)
    return AttentionWorkspace(none, none, none, 0, tuning or AttentionTuning())


def attend(
    query: Tensor,
    cache: PagedCache,
    rows: Tensor,
    scale: float,
    memory: AttentionWorkspace | None = None,
    output: Tensor | None = None,
    logits: SlotLogits | None = None,
    readers: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the live slots.

    Works like `PagedAttention.attend`, except that a new result is float64.
    """
    b, heads, d = query.shape
    h = cache.lengths.shape[1]
    grouped = query.double().view(b, h, heads // h, d)
    result = torch.zeros_like(grouped)
    by_group = [None] * h if sinks is None else sinks.double().view(h, -1)
    for i, row in enumerate(rows.tolist()):
        for head in range(h if row >= 0 else 0):
            key, value = live_slots(cache, row, head)
            if not len(key):
                continue
            scores = grouped[i, head] @ key.T * scale
            if logits is not None:
                logits.logits[i * h + head, :, : len(key)] = scores / math.log(2)
            if readers is not None:
                page_index = torch.arange(len(key), device=key.device) // cache.page_slots
                member = torch.arange(heads // h, device=key.device)[:, None]
                reads = readers[row, head, page_index] >> member & 1
                scores = scores.masked_fill(reads == 0, -torch.inf)
            if logits is not None:
                logits.totals[i * h + head] = scores.logsumexp(-1) / math.log(2)
            result[i, head] = softmax(scores, by_group[head]) @ value
    result = result.view(b, heads, d)
    return result if output is None else output.copy_(result)


def choose(
    cache: PagedCache,
    choice: Choice,
    step: Step,
    query: Tensor,
    scale: float,
    scores: Tensor,
    brought: Tensor | None = None,
) -> None:
    """Mark the token that each KV list evicts after a step, if any.

    Args:
        cache: With positions; its ring of one entry is written.
        choice: Selects the token.
        step: Step whose tokens were appended last.
        query: [b, h * g, d] with RoPE.
        scale: Factor on the products of queries and keys.
        scores: Float [r, h, s]: for SUMMED the attention received so far, for DECAYED the number
            that each token brought; updated for both.
        brought: Float [b, h], number of each new token, for DECAYED.
    """
    assert cache.positions is not None
    b, heads, d = query.shape
    h = cache.lengths.shape[1]
    grouped = query.double().view(b, h, heads // h, d)
    for i, row in enumerate(step.rows.tolist()):
        if row < 0:
            continue
        weights = [
            (grouped[i, g] @ live_slots(cache, row, g)[0].T * scale).softmax(-1) for g in range(h)
        ]
        for head in range(h):
            mine = torch.cat(weights) if choice.together else weights[head]
            received = mine.mean(0) if choice.reduce == MEAN else mine.sum(0)
            received = mine.amax(0) if choice.reduce == MAXIMUM else received
            if choice.kind == SUMMED:
                new = cache.positions[row, head] == int(step.position[i])
                scores[row, head, new] = 0
                scores[row, head, : len(received)] += received
                received = scores[row, head, : len(received)]
            if choice.kind == DECAYED:
                assert brought is not None
                age = int(step.position[i]) - cache.positions[row, head, : len(received)]
                known = scores[row, head, : len(received)]
                known[age == 0] = brought[i, head].to(scores)
                received = age * known
            position = cache.positions[row, head].tolist()
            slot = _chosen(choice, i, int(step.position[i]), received.tolist(), position)
            cache.ring[row, head] = 0 if slot is None else 2 * slot + 1


def _chosen(
    choice: Choice, i: int, time: int, score: list[float], position: list[int]
) -> int | None:
    """Return the slot of the token to evict from the KV list of sequence `i`."""
    limit, recent = int(choice.limit[i]), int(choice.recent[i])
    held = range(len(score))
    if choice.kind == OLDEST:
        due = [s for s in held if limit <= position[s] <= time + 1 - recent]
        return min(due, key=lambda s: position[s], default=None)
    free = [s for s in held if position[s] <= time - recent]
    if len(score) <= limit:
        return None
    return min(free, key=lambda s: (score[s], -position[s]), default=None)


def live_slots(cache: PagedCache, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a KV list, float64 [length, d] each, slot by slot."""
    length, size = int(cache.lengths[row, head]), cache.page_slots
    used = -(-length // size)
    pages = cache.pages[cache.table[row, head, :used].long()].to(_readable(cache.pages)).double()
    if cache.exponents is not None:
        pages = pages * 2.0 ** cache.exponents[row, head, :used, :, None, None].double()
    key, value = pages.transpose(0, 1).flatten(1, 2)[:, :length]
    return key, value


def _readable(pages: Tensor) -> torch.dtype:
    return torch.float32 if pages.dtype == FP8 else pages.dtype
