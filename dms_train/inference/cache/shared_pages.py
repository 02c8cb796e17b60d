"""Copies of the shared pages that decode steps change, made before a burst of steps.

A step that changes a shared page copies it first. A burst of several steps would have to reserve a
page for each of them, which a full cache does not have. With these copies made beforehand, all
steps together take only the pages for their new tokens.

Shape letters: b sequences, h KV heads, p pages of a full KV list, w window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from dms_train.inference.cache.page_tables import PageTables
from dms_train.inference.devices import sent

Rings = Sequence[tuple[list[int], Tensor]]  # layers, and their rings int32 [layers, rows, h, w + 1]


def own_changing_pages(
    lists: PageTables, rings: Rings, rows: Collection[int], spare: float
) -> None:
    """Copy the shared pages that decode steps may change, row after row while there are pages.

    Args:
        lists: KV lists of a cache; rows whose pages were copied leave `copying`.
        rings: Rings of the layers that evict tokens.
        rows: Rows of the steps.
        spare: Most pages to take.
    """
    owners = []
    for row in sorted(lists.copying.intersection(rows)):
        most = lists.shared_pages[row]
        if not rings:  # only the last page of a list changes
            most = min(most, lists.lengths[:, 0].numel())
        if most <= spare:
            spare -= most
            lists.pool.reserve(most)
            owners.append(row)
    if owners:
        lists.copying.difference_update(owners)
        on_device = sent(owners, lists.pool.device)
        changing = _changing_pages(lists, rings, on_device).flatten(0, 2)
        lists.copy_on_write(lists.all_numbers(on_device), changing)


def _changing_pages(lists: PageTables, rings: Rings, rows: Tensor) -> Tensor:
    """Return the pages that decode steps of rows [b] may change, bool [layers, b, h, p].

    A token takes the slot of a token that leaves the window, or the slot after the last one.
    """
    size, lengths = lists.pool.page_slots, lists.lengths[:, rows]
    changing = lists.places() == (lengths // size)[..., None]
    for layers, ring in rings:
        page = (ring[:, rows] // (2 * size)).long()
        changing[layers] = changing[layers].scatter(-1, page, True)
    return changing
