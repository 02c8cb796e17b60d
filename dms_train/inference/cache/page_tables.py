"""KV lists of a paged cache: page tables and lengths that kernels change on the device.

Shape letters: b sequences, h KV heads, p pages of a full KV list, n KV lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.kernels import dispatch


class PageTables:
    """Page tables and lengths of the KV lists of a cache; empty at first.

    The lists of all layers and rows are numbered consecutively. The host does not wait.

    Args:
        pool: Pool of the pages.
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
        places: Pages of a full KV list.

    Attributes:
        pool: As given.
        tables: int32 [layers, rows, h, p], page numbers.
        lengths: int32 [layers, rows, h], slots in use.
        in_row: Lists of a row in all layers.
        shared_pages: Upper bound of the shared pages of each row. Snapshots set it, and the caller
            that frees the row resets it.
        copying: Rows whose decode steps may store tokens in shared pages, which they copy first.
    """

    def __init__(
        self, pool: DevicePool, *, layers: int, rows: int, heads: int, places: int
    ) -> None:
        self.pool = pool
        put: dict[str, Any] = {"dtype": torch.int32, "device": pool.device}
        self.tables = torch.zeros(layers, rows, heads, places, **put)
        self.lengths = torch.zeros(layers, rows, heads, **put)
        self.in_row = layers * heads
        numbers = torch.arange(self.lengths.numel(), device=pool.device)
        self._numbers = numbers.view(layers, rows, heads)
        self._nothing = torch.zeros_like(self.lengths).view(-1)
        self.shared_pages = [0] * rows
        self.copying: set[int] = set()

    def numbers(self, layer: int, rows: Tensor) -> Tensor:
        """Return the numbers of the lists of rows [b] in a layer: int64 [b * h]."""
        return self._numbers[layer, rows].flatten()

    def places(self) -> Tensor:
        """Return the indices of a page table's entries, int64 [p]."""
        return torch.arange(self.tables.shape[-1], device=self.pool.device)

    def pages(self, slots: Tensor) -> Tensor:
        """Return the number of pages that hold these numbers of slots."""
        return (slots + self.pool.page_slots - 1) // self.pool.page_slots

    def allocate(self, layer: int, rows: Tensor, lists: Tensor, lengths: Tensor) -> Tensor:
        """Allocate reserved pages so that lists can hold `lengths` int32 [b * h] slots.

        Args:
            layer: Layer number.
            rows: int64 [b].
            lists: Their `numbers`.
            lengths: Number of slots; the stored lengths of the lists do not change.

        Returns:
            Page tables of the rows, int32 [b, h, p].
        """
        dispatch.triton_kernels().allocate_pages(
            self.tables.flatten(0, 2),
            self.lengths.view(-1),
            lengths,
            lists,
            self.pool.free,
            self.pool.page_slots,
        )
        return self.tables[layer, rows]

    def share(self, row: int, count: int) -> None:
        """Record that a row shares at most `count` pages with a snapshot."""
        self.shared_pages[row] = count
        self.copying.add(row)

    def note_empty(self, row: int) -> None:
        """Record that a row shares no pages."""
        self.shared_pages[row] = 0
        self.copying.discard(row)

    def all_numbers(self, rows: Tensor) -> Tensor:
        """Return the numbers of the lists of rows [b] in all layers: int64 [layers * b * h]."""
        return self._numbers[:, rows].flatten()

    def copy_on_write(self, lists: Tensor, changed: Tensor) -> None:
        """Copy shared pages before they change; pages for the copies are reserved.

        Args:
            lists: `numbers` or `all_numbers` [k].
            changed: Pages that are written, bool [k, p].
        """
        dispatch.triton_kernels().copy_shared_pages(
            self.tables.flatten(0, 2),
            self.lengths.view(-1),
            changed,
            lists,
            self.pool.pages,
            self.pool.free,
        )

    def release(self, lists: Tensor, lengths: Tensor) -> None:
        """Set the lengths of lists, int32 [n], and release the pages after them."""
        self._release(self.tables.flatten(0, 2), self.lengths.view(-1), lengths, lists)

    def free(self, rows: Tensor) -> None:
        """Release all pages of these rows, int64 [b]."""
        lists = self.all_numbers(rows)
        self.release(lists, self._nothing[: len(lists)])

    def free_copies(self, tables: Tensor, lengths: Tensor) -> None:
        """Release all pages of the lists of a snapshot.

        Args:
            tables: int32 [n, p].
            lengths: int32 [n]; set to 0.
        """
        lists = self._numbers.view(-1)[: len(lengths)]
        self._release(tables, lengths, self._nothing[: len(lengths)], lists)

    def _release(self, tables: Tensor, lengths: Tensor, after: Tensor, lists: Tensor) -> None:
        """Release pages like `release`, for the given page tables and lengths."""
        kernels, size = dispatch.triton_kernels(), self.pool.page_slots
        kernels.release_pages(tables, lengths, after, lists, self.pool.free, size)
        self.pool.mark_stale()
