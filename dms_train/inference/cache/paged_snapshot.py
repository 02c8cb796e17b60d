"""Snapshot of one row of a paged cache; its pages are shared, not copied.

Shape letters: h KV heads, p pages of a full KV list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.page_tables import PageTables


class PagedSnapshot:
    """Snapshot that shares the pages of a row and copies the row's tensors.

    Args:
        lists: KV lists of the cache.
        row: The row.
        tokens: Tokens that each of its KV lists holds. None if only the device knows; the host then
            waits for it.
        row_tensors: Tensors of the cache by row, the lengths first, [layers, rows, ...] each.
        place_tensors: Tensors with one entry per page, the page tables first, [layers, rows, h, p,
            ...] each.
    """

    def __init__(
        self,
        lists: PageTables,
        row: int,
        *,
        tokens: int | None,
        row_tensors: list[Tensor],
        place_tensors: list[Tensor],
    ) -> None:
        self._lists = lists
        self._row_tensors, self._page_tensors = row_tensors, place_tensors
        pages = lists.pages(lists.lengths[:, row])
        if tokens is None:
            max_pages, self._count = torch.stack([pages.max(), pages.sum()]).tolist()
        else:
            max_pages = -(-tokens // lists.pool.page_slots)
            self._count = max_pages * lists.in_row
        self._state = [x[:, row].clone() for x in row_tensors]
        self._tables = [x[:, row, :, :max_pages].clone() for x in place_tensors]
        held = lists.places()[:max_pages] < pages[..., None]
        self._tables[0].masked_fill_(~held, 0)  # no page
        self._share(row)

    def restore(self, row: int) -> None:
        """Restore the snapshot into an empty row, which then shares the pages."""
        for x, stored in zip(self._row_tensors, self._state, strict=True):
            x[:, row] = stored
        for x, stored in zip(self._page_tensors, self._tables, strict=True):
            x[:, row, :, : stored.shape[2]] = stored
        self._share(row)

    def release(self) -> None:
        """Release the pages of the snapshot."""
        self._lists.free_copies(self._tables[0].flatten(0, 1), self._state[0].view(-1))

    def _share(self, row: int) -> None:
        """Record that a row and this snapshot hold the same pages."""
        pages = self._tables[0].flatten()
        self._lists.pool.share(pages, (pages != 0).int())
        self._lists.share(row, self._count)
