"""Copies of the shared pages that decode steps change, made before a burst of steps.

A step that changes a shared page copies it first. A burst of several steps would have to reserve a
page for each of them, which a full cache does not have. With these copies made beforehand, all
steps together take only the pages for their new tokens.

Shape letters: b sequences, h KV heads, p pages of a full KV list, w window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from dms_train.inference.cache.page_tables import PageTables
from dms_train.inference.devices import sent


class EvictingLayers(NamedTuple):
    """Layers that evict tokens, n of them.

    Attributes:
        layers: Their numbers, int64 [n] on the device.
        rings: Rings of some layers, int32 [any, rows, h, w + 1].
        at: Indices of the rings of these layers, int64 [n] on the device.
    """

    layers: Tensor
    rings: Tensor
    at: Tensor


def own_changing_pages(
    lists: PageTables, evicting: Sequence[EvictingLayers], rows: Collection[int], spare: float
) -> None:
    """Copy the shared pages that decode steps may change, row after row while there are pages.

    Args:
        lists: KV lists of a cache; rows whose pages were copied leave `copying`.
        evicting: Layers that evict tokens.
        rows: Rows of the steps.
        spare: Most pages to take.
    """
    owners, most = list[int](), _most_changing(lists, evicting)
    for row in sorted(lists.copying.intersection(rows)):
        taken = min(lists.shared_pages[row], most)
        if taken <= spare:
            spare -= taken
            lists.pool.reserve(taken)
            owners.append(row)
    if owners:
        lists.copying.difference_update(owners)
        on_device = sent(owners, lists.pool.device)
        changing = _changing_pages(lists, evicting, on_device).flatten(0, 2)
        lists.copy_on_write(lists.all_numbers(on_device), changing)


def _most_changing(lists: PageTables, evicting: Sequence[EvictingLayers]) -> int:
    """Return the most pages of a row that decode steps may change.

    Without eviction these are the last pages of its lists.
    """
    more = sum(len(each.layers) * each.rings.shape[-1] for each in evicting)
    return lists.in_row + lists.lengths.shape[2] * more


def _changing_pages(lists: PageTables, evicting: Sequence[EvictingLayers], rows: Tensor) -> Tensor:
    """Return the pages that decode steps of rows [b] may change, bool [layers, b, h, p].

    A token takes the slot of a token that leaves the window, or the slot after the last one.
    """
    size, lengths = lists.pool.page_slots, lists.lengths[:, rows]
    changing = lists.places() == (lengths // size)[..., None]
    for layers, rings, at in evicting:
        page = (rings[at[:, None], rows] // (2 * size)).long()
        changing[layers] = changing[layers].scatter(-1, page, True)
    return changing
