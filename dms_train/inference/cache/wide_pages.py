"""Pages in the model's dtype, in which the prompts of an FP8 cache are computed.

The prompt kernels read and write pages of the model's dtype. All layers use these pages in turn.
Before a chunk, the contents of the cache are read into them; afterwards, the changed pages are
stored. Nothing here waits for the device.

Shape letters: b sequences, h KV heads, p pages of a full KV list, s slots, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.kernels import dispatch
from dms_train.kernels.prefill.lists import Pages


class WidePages:
    """Memory for the KV lists of one layer of one full sequence, or of several shorter ones.

    Args:
        pool: Pool of the FP8 pages of the cache, [any, 2, s, d].
        heads: KV heads.
        places: Pages of a full KV list.
    """

    def __init__(self, pool: DevicePool, *, heads: int, places: int) -> None:
        self._pool, self._heads, self._max_pages = pool, heads, places
        shape = (heads * places, *pool.pages.shape[1:])
        self._pages = torch.empty(shape, dtype=pool.dtype, device=pool.device)
        self._numbers = torch.arange(heads * places, dtype=torch.int32, device=pool.device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pages."""
        return self._pages.nbytes + self._numbers.nbytes

    def sequences(self, tokens: int) -> int:
        """Return the number of sequences of `tokens` tokens that fit at a time, at least 1."""
        slots = self._pages.shape[2]
        return max(1, self._max_pages // -(-tokens // slots))

    def read(self, table: Tensor, exponents: Tensor, lengths: Tensor) -> Pages:
        """Return the KV lists of a chunk's sequences.

        Args:
            table: int32 [b, h, p], their stored pages.
            exponents: int8 [b, h, p, 2].
            lengths: int32 [b, h], slots in use.
        """
        pages = self.empty(len(table))
        dispatch.triton_kernels().read_fp8_pages(
            self._pool.pages,
            table.flatten(0, 1),
            exponents.flatten(0, 1),
            lengths.flatten().contiguous(),
            self._lists(len(table)),
        )
        return pages

    def empty(self, sequences: int) -> Pages:
        """Return the pages for KV lists that are still empty."""
        num_pages = self._max_pages // sequences
        numbers = self._numbers[: sequences * self._heads * num_pages]
        return Pages(self._pages, numbers.view(sequences, self._heads, num_pages))

    def write(
        self, table: Tensor, exponents: Tensor, lengths: Tensor, changed: Tensor | None
    ) -> None:
        """Store the KV lists.

        Args:
            table: int32 [b, h, p], the pages to store to.
            exponents: int8 [b, h, p, 2]; written.
            lengths: int32 [b, h], slots in use.
            changed: bool [b, h, p], pages to store; None for all.
        """
        dispatch.triton_kernels().write_fp8_pages(
            self._lists(len(table)),
            self._pool.pages,
            table.flatten(0, 1),
            exponents.flatten(0, 1),
            lengths.flatten().contiguous(),
            None if changed is None else changed.flatten(0, 1),
        )

    def _lists(self, sequences: int) -> Tensor:
        """Return the pages by KV list, [b * h, p, 2, s, d]."""
        lists, num_pages = sequences * self._heads, self._max_pages // sequences
        return self._pages[: lists * num_pages].view(lists, num_pages, *self._pages.shape[1:])
