"""Memory of compact caches: slabs of pages of slots, shared by layers and sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.allocator import PageAllocator


class BySlab(NamedTuple):
    """Slots or pages sorted by the slab they lie in, so that each slab is visited once.

    Attributes:
        order: int64 [n], their indices in the list before sorting.
        parts: Slab number and int64 [.] offsets in that slab, in this order.
    """

    order: Tensor
    parts: list[tuple[int, Tensor]]


class PagePool:
    """Slots by number. A slot holds a key, a value, a position and the policy's numbers.

    Slot S lies in page S // page_slots at offset S % page_slots.

    Args:
        head_size: Channels of a key and of a value.
        state_width: float32 numbers a policy keeps with each slot.
        dtype: Dtype of keys and values.
        device: Device of the slabs.
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
    def max_pages(self) -> int | None:
        """Return the pages of all slabs that may be open; None without a limit."""
        slabs = self.allocator.max_slabs
        return None if slabs is None else slabs * self.allocator.slab_pages

    def limit(self, slabs: int) -> None:
        """Limit the number of slabs that are open at the same time."""
        self.allocator.max_slabs = slabs

    @property
    def slab_bytes(self) -> int:
        """Return the bytes of one slab."""
        return self._slab_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot, all fields together."""
        sizes = (torch.Size(tail).numel() * t.itemsize for tail, t in self._fields.values())
        return sum(sizes)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page."""
        return self.page_slots * self.slot_bytes

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of the slabs that exist now."""
        return len(self._slabs) * self.slab_bytes

    def allocate(self, count: int) -> Tensor:
        """Take pages. Returns their numbers, int64 [count]."""
        pages, opened = self.allocator.allocate(count)
        try:
            for slab in opened:
                self._slabs[slab] = {
                    name: torch.zeros(self._slab_slots, *tail, dtype=dtype, device=self.device)
                    for name, (tail, dtype) in self._fields.items()
                }
        except BaseException:
            for slab in self.allocator.release(pages):
                self._slabs.pop(slab, None)
            raise
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        taken = torch.tensor(pages, dtype=torch.int64, device=self.device)
        # slots after the last token are multiplied by 0, and 0 times a stale NaN is NaN
        for slab, offset in self.by_slab(taken).parts:
            self._paged(slab, "value")[offset] = 0
        return taken

    def share(self, pages: Tensor) -> None:
        """Add a holder to each of these pages, int64 [count]."""
        self.allocator.share(pages.tolist())

    def shared(self, pages: Tensor) -> Tensor:
        """Return which pages have several holders: int64 [...] to bool [...]; False for -1."""
        if not self.allocator.sharing:
            return torch.zeros_like(pages, dtype=torch.bool)
        is_shared = self.allocator.shared(pages.flatten().tolist())
        return torch.tensor(is_shared, dtype=torch.bool, device=pages.device).view(pages.shape)

    def unshare(self, pages: Tensor) -> Tensor:
        """Copy pages, int64 [count], and release the originals. Returns the copies, int64 [count].

        The originals keep their content until pages are taken again.
        """
        copies = self.allocate(len(pages))
        offset = torch.arange(self.page_slots, device=pages.device)
        source, target = (
            (p[:, None] * self.page_slots + offset).flatten() for p in (pages, copies)
        )
        self.write(target, {field: self.read(field, source) for field in self._fields})
        self.release(pages)
        return copies

    def release(self, pages: Tensor) -> None:
        """Remove a holder from pages, int64 [count]; slabs without holders return to the system."""
        for slab in self.allocator.release(pages.tolist()):
            del self._slabs[slab]

    def by_slab(self, pages: Tensor) -> BySlab:
        """Sort page numbers, int64 [n], for `read_pages`; -1 entries are left out."""
        return _by_slab(pages, self.allocator.slab_pages)

    def read_pages(self, field: str, pages: BySlab) -> Tensor:
        """Return one field of whole pages, in the order of `pages`: [n, page_slots, *field]."""
        tail, dtype = self._fields[field]
        shape = (len(pages.order), self.page_slots, *tail)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        counts = [len(offset) for _, offset in pages.parts]
        for (slab, offset), into in zip(pages.parts, torch.split(values, counts), strict=True):
            torch.index_select(self._paged(slab, field), 0, offset, out=into)
        return values

    def read(self, field: str, slots: Tensor) -> Tensor:
        """Gather one field. slots: int64 [...], -1 reads zeros. Returns [..., *field]."""
        tail, dtype = self._fields[field]
        flat = _by_slab(slots.reshape(-1), self._slab_slots)
        values = torch.zeros(slots.numel(), *tail, dtype=dtype, device=self.device)
        slab_values = [
            self._slabs[slab][field].index_select(0, offset) for slab, offset in flat.parts
        ]
        if slab_values:
            values[flat.order] = torch.cat(slab_values)
        return values.reshape(*slots.shape, *tail)

    def write(self, slots: Tensor, fields: dict[str, Tensor]) -> None:
        """Scatter fields. slots: int64 [n], all different; values of fields: [n, *field]."""
        order, slab_offsets = _by_slab(slots, self._slab_slots)
        counts = [len(offset) for _, offset in slab_offsets]
        for field, values in fields.items():
            values = values.detach().to(self._fields[field][1])[order]
            for (slab, offset), part in zip(slab_offsets, torch.split(values, counts), strict=True):
                self._slabs[slab][field][offset] = part

    def _paged(self, slab: int, field: str) -> Tensor:
        """Return one field of a slab, [pages, page_slots, *field]."""
        flat = self._slabs[slab][field]
        return flat.view(self.allocator.slab_pages, self.page_slots, *flat.shape[1:])


def _by_slab(numbers: Tensor, per_slab: int) -> BySlab:
    """Sort slot or page numbers, int64 [n], by slab; -1 entries are left out."""
    slab = numbers.div(per_slab, rounding_mode="floor")
    order = slab.argsort(stable=True)
    absent, *counts = torch.bincount(slab + 1, minlength=1).tolist()
    order = order[absent:]
    offsets = torch.split(numbers[order] % per_slab, counts)
    return BySlab(order, [(n, offset) for n, offset in enumerate(offsets) if counts[n]])
