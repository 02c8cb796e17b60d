"""Pages whose free list lies on the device, where decode kernels pop it without the host.

The host keeps a lower bound of the free pages: it subtracts what every step may have popped, and
reads the count from the device only when the bound reaches 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.kernels.decode.paged import FreePages


class PageSlabs:
    """Slabs of pages [2, page_slots, head_size], numbered by their distance from the first slab.

    Page 0 is never allocated, so that unused entries of page tables can point to it.

    Args:
        head_size: Channels of a key and of a value.
        dtype: Of keys and values.
        device: Where the slabs live.
        page_slots: Slots of one page.
        slab_pages: Pages of one slab, the unit in which memory is taken and returned.
    """

    def __init__(
        self,
        *,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        page_slots: int = 16,
        slab_pages: int = 256,
    ) -> None:
        self.device = device
        self.page_slots = page_slots
        self.slab_pages = slab_pages
        self.slot_bytes = 2 * head_size * dtype.itemsize
        self.peak_bytes = 0
        self._max_slabs: int | None = None
        self._shape = (slab_pages, 2, page_slots, head_size)
        self._dtype = dtype
        self._origin: int | None = None
        self._slabs: dict[int, Tensor] = {}  # by the number of its first page
        self._at_least = 0  # free pages, lower bound
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        self.free = FreePages(zero.repeat(slab_pages), zero.clone(), zero.clone())
        self._open()

    @property
    def max_pages(self) -> int | None:
        """Pages of all slabs that may be open, without page 0; None without a limit."""
        return None if self._max_slabs is None else self._max_slabs * self.slab_pages - 1

    def limit(self, slabs: int) -> None:
        """Open no more slabs than this at the same time."""
        self._max_slabs = slabs

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab, with the page lost to alignment."""
        return (self.slab_pages + 1) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_slots * self.slot_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slabs that exist now."""
        return len(self._slabs) * self.slab_bytes

    @property
    def pages(self) -> Tensor:
        """The first slab, [slab_pages, 2, page_slots, head_size], from which pages are numbered."""
        return self._slabs[0]

    @property
    def lowest(self) -> tuple[Tensor, int]:
        """The slab that comes first in memory, and the number of its first page."""
        first = min(self._slabs)
        return self._slabs[first], first

    def reserve(self, count: int) -> None:
        """Have `count` free pages ready, which kernels may pop from now on.

        Raises:
            RuntimeError: A kernel found no page for a token, so that the contents of its cache are
                invalid; or the limit of slabs leaves fewer pages.
        """
        if self._at_least < count:
            self._at_least, fault = torch.cat([self.free.left, self.free.fault]).tolist()
            if fault:
                raise RuntimeError(f"a token was not stored (fault {fault})")
        while self._at_least < count:
            self._open()
        self._at_least -= count

    def take(self, count: int) -> Tensor:
        """Pop pages: int32 [count]."""
        self.reserve(count)
        self.free.left.sub_(count)
        at = self.free.left + torch.arange(count, device=self.device)
        return self.free.numbers[at]

    def release(self, pages: Tensor) -> None:
        """Give pages back, int32 [count]; slabs that become free are returned to the system."""
        left = self._push(pages)
        numbers = self.free.numbers[:left]
        starts = torch.tensor(sorted(self._slabs), dtype=torch.int32, device=self.device)
        home = torch.bucketize(numbers, starts, right=True) - 1
        idle = torch.bincount(home, minlength=len(starts)) == self.slab_pages
        for start in starts[idle].tolist():
            del self._slabs[start]
        kept = numbers[~idle[home]]
        self.free.numbers[: len(kept)] = kept.clone()
        self.free.left.fill_(len(kept))
        self._at_least = len(kept)

    def read(self, pages: Tensor) -> Tensor:
        """Whole pages, int32 [n] to [n, 2, page_slots, head_size]."""
        content = torch.empty(len(pages), *self._shape[1:], dtype=self._dtype, device=self.device)
        for slab, chosen, offset in self._by_slab(pages):
            content[chosen] = slab[offset]
        return content

    def write(self, pages: Tensor, content: Tensor) -> None:
        """Overwrite whole pages, all different. content: [n, 2, page_slots, head_size]."""
        for slab, chosen, offset in self._by_slab(pages):
            slab[offset] = content[chosen]

    def _by_slab(self, pages: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each slab that has some: the slab, their places in the list, their offsets in it."""
        found = []
        for start, slab in self._slabs.items():
            inside = (pages >= start) & (pages < start + self.slab_pages)
            chosen = inside.nonzero()[:, 0]
            if len(chosen):
                found.append((slab, chosen, pages[chosen].long() - start))
        return found

    def _open(self) -> None:
        """Take another slab from the system and push its pages."""
        if self._max_slabs is not None and len(self._slabs) >= self._max_slabs:
            raise RuntimeError(f"the cache is full: {len(self._slabs)} slabs are open")
        size = self.page_bytes
        memory = torch.empty((self.slab_pages + 1) * size, dtype=torch.uint8, device=self.device)
        address = memory.data_ptr()
        if self._origin is None:
            self._origin = address
        skip = (self._origin - address) % size
        start = (address + skip - self._origin) // size
        if not -(2**31) <= start < 2**31 - self.slab_pages:
            raise RuntimeError("a slab lies too far from the first one to be numbered")
        pages = memory[skip : skip + self.slab_pages * size].view(self._dtype).view(self._shape)
        numbers = torch.arange(start, start + self.slab_pages, dtype=torch.int32)
        self._slabs[start] = pages
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._at_least = self._push(numbers[int(start == 0) :].flip(0).to(self.device))

    def _push(self, pages: Tensor) -> int:
        """Put pages on the stack. Returns how many it holds then."""
        left = int(self.free.left)
        total = left + len(pages)
        if total > len(self.free.numbers):
            wider = self.free.numbers.new_zeros(2 * total)
            wider[:left] = self.free.numbers[:left]
            self.free = self.free._replace(numbers=wider)
        self.free.numbers[left:total] = pages
        self.free.left.fill_(total)
        return total
