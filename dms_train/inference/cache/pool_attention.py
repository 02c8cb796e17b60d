"""Attention of one query per head over slots of a `PagePool`.

Shape letters: b sequences, h KV heads, r query heads per KV head, p pages, s slots, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.pool import PagePool
from dms_train.kernels.decode.slots import SecondQuery, attend_slots
from dms_train.kernels.sinks import softmax


def pages_of(numbers: Tensor, page_slots: int) -> Tensor:
    """Return the page numbers of slot numbers of whole pages, int64 [b, h, p]; -1 for none.

    Args:
        numbers: int64 [b, h, s]; -1 after the last live slot.
        page_slots: Slots of a page.
    """
    return numbers[..., ::page_slots].div(page_slots, rounding_mode="floor")


def attend_chosen(
    pool: PagePool, numbers: Tensor, chosen: Tensor, query: Tensor, second: SecondQuery | None
) -> Attended:
    """Attend to some slots; other slots are not read.

    Args:
        pool: Pool of the slots.
        numbers: Slot numbers, int64 [b, h, s].
        chosen: bool [b, h, r, s].
        query: [b, h, r, d].
        second: Other queries [b, h * r, 1, d] for some of these slots; None for none.
    """
    read = chosen.any(2)
    most = int(read.sum(-1).max())
    order = read.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    some = torch.where(read, numbers, -1).gather(2, order)
    key, value = pool.read("key", some), pool.read("value", some)
    mask = chosen.gather(3, order[:, :, None].expand(-1, -1, chosen.shape[2], -1))
    if second is not None:
        second = second._replace(slots=second.slots.gather(2, order))
    query = query.flatten(1, 2)[:, :, None]
    output, _ = attend_slots(query, key, value, mask[:, :, :, None], second)
    return Attended(output, read.sum(-1))


def attend_pages(
    pool: PagePool, numbers: Tensor, query: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Run `attend_slots` with one query per head over all slots; returns [b, h, r, d].

    Pages are multiplied in the order in which the pool reads them; only scores and outputs are
    sorted by sequence.

    Args:
        pool: Pool of the slots.
        numbers: Slot numbers of whole pages, int64 [b, h, s]; -1 after the last live one.
        query: [b, h, r, d].
        sinks: Logits [h * r] in the denominators; None for none.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    b, h, r, d = query.shape
    pages = pages_of(numbers, pool.page_slots)
    columns, size = pages.shape[-1], pool.page_slots
    chosen = pool.by_slab(pages.flatten())
    kv_list = chosen.order.div(max(1, columns), rounding_mode="floor")
    key = pool.read_pages("key", chosen).to(wide)  # [pages, page slots, d]
    scores = query.reshape(b * h, r, d).to(wide)[kv_list] @ key.transpose(1, 2) * d**-0.5
    by_list = scores.new_zeros(pages.numel(), r, size)
    by_list[chosen.order] = scores
    empty = (numbers < 0).view(b, h, columns, 1, size)
    by_list = by_list.view(b, h, columns, r, size).masked_fill(empty, torch.finfo(wide).min)
    by_head = None if sinks is None else sinks.view(h, r)
    weights = softmax(by_list.transpose(2, 3).flatten(3), by_head)  # [b, h, r, s]
    by_page = weights.view(b, h, r, columns, size).transpose(2, 3).flatten(0, 2)
    value = pool.read_pages("value", chosen)
    page_outputs = by_page[chosen.order].to(value.dtype) @ value
    output = torch.zeros(b * h, r, d, dtype=wide, device=page_outputs.device)
    output.index_add_(0, kv_list, page_outputs.to(wide))
    return output.to(value.dtype).view(b, h, r, d)
