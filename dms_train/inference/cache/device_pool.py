"""Page pool with its free list on the device, where decode kernels pop pages without the host.

All memory is taken once. The host keeps a lower bound of the number of free pages, and lowers it by
the pages that each step may pop. It learns the true number after each step without waiting, and
reads it from the device only if the bound is too low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.kernels.decode.types import FreePages


class DevicePool:
    """Pages [2, page_slots, head_size], each with a number of holders.

    Page 0 is never allocated, so that unused entries of page tables can point to it.

    Args:
        head_size: Channels of a key and of a value.
        dtype: Dtype in which the model computes keys and values.
        device: Device of the pages.
        page_slots: Slots of one page.
        pages: Number of pages besides page 0.
        stored: Dtype of keys and values in the pages, if it is another one.

    Attributes:
        pages: All pages, [pages + 1, 2, page_slots, head_size].
        free: Stack of the free pages.
        page_slots: As given.
        dtype: As given.
        max_pages: Pages that can be allocated.
        peak_pages: Most pages in use at the times when the host has read their number.
        slot_bytes: Bytes of one slot.
        sharing: Whether any page may have several holders.
        reserved: Pages that were reserved or taken since the beginning.
    """

    def __init__(
        self,
        *,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        page_slots: int,
        pages: int,
        stored: torch.dtype | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.page_slots, self.max_pages = page_slots, pages
        shape = (pages + 1, 2, page_slots, head_size)
        self.pages = torch.empty(shape, dtype=stored or dtype, device=device)
        self.slot_bytes = 2 * head_size * self.pages.itemsize
        self.free = FreePages.all_of(pages, device)
        assert self.free.holders is not None
        self._holders = self.free.holders
        self.sharing = False
        self.peak_pages = 0
        self._left = pages  # free pages, a lower bound
        self._exact = True  # whether the bound is their number
        self.reserved = 0

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page, including its bookkeeping."""
        return self.page_slots * self.slot_bytes + 8

    @property
    def used_pages(self) -> int:
        """Return the number of pages in use; waits for kernels that may have taken some."""
        if not self._exact:
            self._read()
        return self.max_pages - self._left

    def reserve(self, count: int) -> None:
        """Reserve `count` free pages, which kernels may pop from now on.

        Raises:
            RuntimeError: A kernel found no page for a token, so that the contents of its cache are
                invalid; or fewer pages are free.
        """
        self._require(count)
        self._left -= count
        self.reserved += count
        self._exact = False

    def free_pages(self, least: int) -> int:
        """Return the number of free pages; a lower bound is enough if it reaches `least`."""
        if self._left < least and not self._exact:
            self._read()
        return self._left

    def mark_stale(self) -> None:
        """Mark the free count as a lower bound, because a kernel has released pages."""
        self._exact = False

    def sync_free_count(self, left: int, fault: int, reserved: int) -> None:
        """Update the number of free pages from an earlier step.

        Args:
            left: Free pages on the device then.
            fault: `FreePages.fault` then.
            reserved: `reserved` of the pool then.

        Raises:
            RuntimeError: A kernel found no page for a token.
        """
        self._check(fault)
        if not self._exact:
            self._left = max(self._left, left - (self.reserved - reserved))
        self.peak_pages = max(self.peak_pages, self.max_pages - left)

    def take(self, count: int) -> Tensor:
        """Pop pages, each with one holder: int32 [count].

        Raises:
            RuntimeError: As in `reserve`.
        """
        self._require(count)
        self._left -= count
        self.reserved += count
        self.free.left.sub_(count)
        at = self.free.left + torch.arange(count, device=self.device)
        return self.free.numbers[at]

    def share(self, pages: Tensor, more: Tensor) -> None:
        """Add holders to pages.

        Args:
            pages: int32 [count].
            more: int32 [count], how many; 0 for any entry that is not a page.
        """
        self.sharing = True
        self._holders.index_add_(0, pages, more)

    def _push(self, pages: Tensor) -> None:
        """Push pages without a holder to the stack."""
        left = self.free.left + torch.arange(len(pages), device=self.device)
        self.free.numbers[left] = pages
        self._holders[pages] = 1
        self.free.left.add_(len(pages))

    def _require(self, count: int) -> None:
        if self._left < count and not self._exact:
            self._read()
        if self._left < count:
            raise RuntimeError(f"the cache is full: {self._left} pages are free, {count} asked for")

    def _read(self) -> None:
        """Read from the device how many pages are free.

        Pages that all of their holders copied in the same step are collected here.
        """
        status = [self.free.left, self.free.fault]
        if self.sharing:
            self._push((self._holders == 0).nonzero()[:, 0].int())
            status.append(self._holders.max().view(1))
        self._left, fault, *most = torch.cat(status).tolist()
        self.sharing, self._exact = most > [1], True
        self.peak_pages = max(self.peak_pages, self.max_pages - self._left)
        self._check(fault)

    @staticmethod
    def _check(fault: int) -> None:
        if fault:
            raise RuntimeError(f"a token was not stored (fault {fault})")
