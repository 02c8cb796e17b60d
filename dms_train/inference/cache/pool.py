"""The memory behind compact caches: pages of slots in slabs, shared by layers and sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.allocator import PageAllocator


class PagePool:
    """Slots by number. A slot holds a key, a value, a position and a policy's numbers.

    Slot S lies in page S // page_slots at offset S % page_slots.

    Args:
        head_size: Channels of a key and of a value.
        state_width: float32 numbers a policy keeps with each slot.
        dtype: Of keys and values.
        device: Where the slabs live.
        page_slots: Slots of one page.
        slab_pages: Pages of one slab, the unit in which memory is taken and returned.
    """

    def __init__(
        self,
        *,
        head_size: int,
        state_width: int,
        dtype: torch.dtype,
        device: torch.device,
        page_slots: int = 16,
        slab_pages: int = 256,
    ) -> None:
        self.device = device
        self.page_slots = page_slots
        self.allocator = PageAllocator(slab_pages)
        self.peak_bytes = 0
        self._slab_slots = slab_pages * page_slots
        self._fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "key": ((head_size,), dtype),
            "value": ((head_size,), dtype),
            "position": ((), torch.int32),
            "state": ((state_width,), torch.float32),
        }
        self._slabs: dict[int, dict[str, Tensor]] = {}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot with everything that belongs to it."""
        sizes = (torch.Size(tail).numel() * t.itemsize for tail, t in self._fields.values())
        return sum(sizes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_slots * self.slot_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slabs that exist now."""
        return len(self._slabs) * self._slab_slots * self.slot_bytes

    def allocate(self, count: int) -> Tensor:
        """Take pages. Returns their numbers, int64 [count]."""
        pages, opened = self.allocator.allocate(count)
        for slab in opened:
            self._slabs[slab] = {
                name: torch.zeros(self._slab_slots, *tail, dtype=dtype, device=self.device)
                for name, (tail, dtype) in self._fields.items()
            }
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return torch.tensor(pages, dtype=torch.int64, device=self.device)

    def release(self, pages: Tensor) -> None:
        """Give pages back, int64 [count]; slabs that become free are returned to the system."""
        for slab in self.allocator.release(pages.tolist()):
            del self._slabs[slab]

    def read(self, field: str, slots: Tensor) -> Tensor:
        """Gather one field. slots: int64 [...], -1 reads zeros. Returns [..., *field]."""
        tail, dtype = self._fields[field]
        flat = slots.reshape(-1)
        values = torch.zeros(len(flat), *tail, dtype=dtype, device=self.device)
        for number, slab in self._slabs.items():
            chosen = (flat // self._slab_slots == number).nonzero().squeeze(1)
            values[chosen] = slab[field][flat[chosen] - number * self._slab_slots]
        return values.reshape(*slots.shape, *tail)

    def write(self, field: str, slots: Tensor, values: Tensor) -> None:
        """Scatter one field. slots: int64 [n], all different; values: [n, *field]."""
        _, dtype = self._fields[field]
        values = values.detach().to(dtype)
        for number, slab in self._slabs.items():
            chosen = (slots // self._slab_slots == number).nonzero().squeeze(1)
            slab[field][slots[chosen] - number * self._slab_slots] = values[chosen]

    def slabs(self, field: str) -> tuple[Tensor | None, ...]:
        """One field of every slab as [pages, page_slots, ...], by slab number."""
        count = max(self._slabs, default=-1) + 1
        found = [self._slabs[n][field] if n in self._slabs else None for n in range(count)]
        size = self.page_slots
        return tuple(None if t is None else t.view(-1, size, *t.shape[1:]) for t in found)
