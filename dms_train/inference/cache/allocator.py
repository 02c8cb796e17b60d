"""Allocation of page numbers; no tensors.

Pages are numbered consecutively; page P lies in slab P // slab_pages. A slab is opened when no page
is free and closed when all of its pages are. The lowest slabs are filled first, so that the highest
ones become free. A page may have several holders; it is free again when the last one has released
it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice


class PageAllocator:
    """Allocator of page numbers.

    Args:
        slab_pages: Pages of one slab.

    Attributes:
        slab_pages: As given.
        max_slabs: Most slabs open at the same time; None for no limit.
    """

    def __init__(self, slab_pages: int) -> None:
        if slab_pages < 1:
            raise ValueError(f"slab_pages={slab_pages}: at least 1")
        self.slab_pages = slab_pages
        self.max_slabs: int | None = None
        self._free: dict[int, list[int]] = {}  # key: number of an open slab
        self._holders: dict[int, int] = {}  # key: page in use
        self._shares = 0  # holders beyond the first, all pages together
        self._fillable: list[int] = []  # heap of slabs; entries may be out of date
        self._closed: list[int] = []  # heap of slab numbers to open again
        self._opened = 0  # slab numbers ever used

    @property
    def used(self) -> int:
        """Return the number of pages in use."""
        return len(self._holders)

    @property
    def sharing(self) -> bool:
        """Return whether any page has several holders."""
        return self._shares > 0

    @property
    def slabs(self) -> list[int]:
        """Return the numbers of the open slabs, ascending."""
        return sorted(self._free)

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Take `count` pages. Returns their numbers, and the numbers of newly opened slabs.

        Raises:
            RuntimeError: `max_slabs` leaves fewer; nothing was taken.
        """
        if self.max_slabs is not None and self.used + count > self.max_slabs * self.slab_pages:
            raise RuntimeError(f"the cache is full: {self.used} pages in use, {count} asked for")
        pages: list[int] = []
        opened: list[int] = []
        while len(pages) < count:
            while self._fillable and not self._free.get(self._fillable[0]):
                heapq.heappop(self._fillable)
            if not self._fillable:
                opened.append(self._open())
            free = self._free[self._fillable[0]]
            take = min(count - len(pages), len(free))
            pages += reversed(free[-take:])
            del free[-take:]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages, opened

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages, which are in use."""
        for page in pages:
            self._holders[page] += 1
            self._shares += 1

    def shared(self, pages: Iterable[int]) -> list[bool]:
        """Return which pages have several holders."""
        return [self._holders.get(page, 0) > 1 for page in pages]

    def count_shared(self, pages: Iterable[int], most: int | None) -> int:
        """Count the pages with several holders, up to `most`."""
        shared = (page for page in pages if self._holders.get(page, 0) > 1)
        return sum(1 for _ in islice(shared, most))

    def release(self, pages: Iterable[int]) -> list[int]:
        """Remove one holder from each page. Returns the slabs that became free and were closed.

        Raises:
            ValueError: If a page is not in use.
        """
        touched = set()
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"page {page} is not in use")
            if self._holders[page] > 1:
                self._holders[page] -= 1
                self._shares -= 1
                continue
            del self._holders[page]
            slab = page // self.slab_pages
            if not self._free[slab]:
                heapq.heappush(self._fillable, slab)
            self._free[slab].append(page)
            touched.add(slab)
        idle = [slab for slab in sorted(touched) if len(self._free[slab]) == self.slab_pages]
        for slab in idle:
            del self._free[slab]
            heapq.heappush(self._closed, slab)
        return idle

    def _open(self) -> int:
        if self._closed:
            slab = heapq.heappop(self._closed)
        else:
            slab, self._opened = self._opened, self._opened + 1
        first = slab * self.slab_pages
        self._free[slab] = list(range(first + self.slab_pages - 1, first - 1, -1))
        heapq.heappush(self._fillable, slab)
        return slab
