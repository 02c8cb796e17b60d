"""Memory of the cache of `generate`: pages of slots in slabs, shared by layers and sequences.

This file is shipped with the weights and needs only torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PagePool"]


class BySlab(NamedTuple):
    """Slots or pages sorted by slab, so that each slab is visited once.

    Attributes:
        order: int64 [n], index of each one in the list that was sorted.
        parts: Slab number and int64 [.] offsets in that slab, in this order.
    """

    order: Tensor
    parts: list[tuple[int, Tensor]]


class PagePool:
    """Slots by number. Slot S lies in page S // page_slots at offset S % page_slots.

    Page P lies in slab P // slab_pages. A slab is allocated when no page is free, and freed when
    all of its pages are. Pages of low slabs are used first, so that high slabs become free.

    Args:
        head_size: Channels of a key and of a value.
        dtype: Dtype of keys and values.
        device: Device of the slabs.
        page_slots: Slots of one page.
        slab_pages: Pages of one slab.
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
        self._slab_pages = slab_pages
        self._slab_slots = slab_pages * page_slots
        self._fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "key": ((head_size,), dtype),
            "value": ((head_size,), dtype),
            "position": ((), torch.int32),
            "marked": ((), torch.float32),
        }
        self._slabs: dict[int, dict[str, Tensor]] = {}
        self._free: dict[int, list[int]] = {}  # page numbers by slab

    @property
    def used_pages(self) -> int:
        """Pages in use."""
        return len(self._free) * self._slab_pages - sum(map(len, self._free.values()))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slabs that exist now."""
        return sum(tensor.nbytes for slab in self._slabs.values() for tensor in slab.values())

    def allocate(self, count: int) -> Tensor:
        """Take pages. Returns their numbers, int64 [count]."""
        pages: list[int] = []
        while len(pages) < count:
            slab = min((slab for slab, free in self._free.items() if free), default=None)
            free = self._free[self._open() if slab is None else slab]
            take = min(count - len(pages), len(free))
            pages += reversed(free[-take:])
            del free[-take:]
        taken = torch.tensor(pages, dtype=torch.int64, device=self.device)
        # slots after the last token are multiplied by 0, and 0 times a stale NaN is NaN
        for slab, offset in self.by_slab(taken).parts:
            self._paged(slab, "value")[offset] = 0
        return taken

    def _open(self) -> int:
        slab = next(n for n in range(len(self._slabs) + 1) if n not in self._slabs)
        self._slabs[slab] = {
            name: torch.zeros(self._slab_slots, *tail, dtype=dtype, device=self.device)
            for name, (tail, dtype) in self._fields.items()
        }
        first = slab * self._slab_pages
        self._free[slab] = list(range(first + self._slab_pages - 1, first - 1, -1))
        return slab

    def release(self, pages: Tensor) -> None:
        """Return pages, int64 [count]; slabs without a page in use go back to the system."""
        for page in pages.tolist():
            self._free[page // self._slab_pages].append(page)
        for slab in [n for n, free in self._free.items() if len(free) == self._slab_pages]:
            del self._slabs[slab], self._free[slab]

    def by_slab(self, pages: Tensor) -> BySlab:
        """Sort page numbers, int64 [n], for `read_pages`; entries of -1 are left out."""
        return _by_slab(pages, self._slab_pages)

    def read_pages(self, field: str, pages: BySlab) -> Tensor:
        """Read one field of whole pages, in the order of `pages`: [n, page_slots, *field]."""
        tail, dtype = self._fields[field]
        shape = (len(pages.order), self.page_slots, *tail)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        counts = [len(offset) for _, offset in pages.parts]
        for (slab, offset), into in zip(pages.parts, torch.split(values, counts), strict=True):
            torch.index_select(self._paged(slab, field), 0, offset, out=into)
        return values

    def read(self, field: str, slots: Tensor) -> Tensor:
        """Read one field of slots, int64 [n]; -1 reads zeros. Returns [n, *field]."""
        tail, dtype = self._fields[field]
        order, parts = _by_slab(slots, self._slab_slots)
        values = torch.zeros(len(slots), *tail, dtype=dtype, device=self.device)
        if parts:
            values[order] = torch.cat(
                [self._slabs[slab][field].index_select(0, offset) for slab, offset in parts]
            )
        return values

    def write(self, slots: Tensor, fields: dict[str, Tensor]) -> None:
        """Write fields [n, *field] of slots, int64 [n], all different."""
        order, parts = _by_slab(slots, self._slab_slots)
        counts = [len(offset) for _, offset in parts]
        for field, values in fields.items():
            values = values.detach().to(self._fields[field][1])[order]
            for (slab, offset), part in zip(parts, torch.split(values, counts), strict=True):
                self._slabs[slab][field][offset] = part

    def _paged(self, slab: int, field: str) -> Tensor:
        """One field of a slab, [pages, page_slots, *field]."""
        flat = self._slabs[slab][field]
        return flat.view(self._slab_pages, self.page_slots, *flat.shape[1:])


def _by_slab(numbers: Tensor, per_slab: int) -> BySlab:
    """Sort slot or page numbers, int64 [n], by slab; entries of -1 are left out."""
    slab = numbers.div(per_slab, rounding_mode="floor")
    order = slab.argsort(stable=True)
    absent, *counts = torch.bincount(slab + 1, minlength=1).tolist()
    order = order[absent:]
    offsets = torch.split(numbers[order] % per_slab, counts)
    return BySlab(order, [(n, offset) for n, offset in enumerate(offsets) if counts[n]])
