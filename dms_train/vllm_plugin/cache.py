"""Paged cache in the memory that vLLM allocates.

The scheduler grants every request enough pages before a step. The host therefore neither reserves
nor counts pages.

Shape letters: b sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_local import LocalPagedCache
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.local_layers import with_windows
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import AttentionWorkspace, FreePages, PagedCache, Step
from dms_train.method.dms.spec import DMSSpec


class GrantedPool(DevicePool):
    """Page pool that has no pages until `bind`; the host neither reserves nor counts them.

    Args:
        head_size: Channels of a key and of a value.
        dtype: Dtype of keys and values.
        device: Device of the pages.
        page_slots: Slots of one page.
        stored: Dtype of keys and values in the pages, if it is another one.
    """

    def __init__(
        self,
        *,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        page_slots: int,
        stored: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            head_size=head_size,
            dtype=dtype,
            device=device,
            page_slots=page_slots,
            pages=0,
            stored=stored,
        )

    def bind(self, memory: Tensor) -> None:
        """Use memory for pages, all of them free; no request may hold any.

        Args:
            memory: Memory without gaps, of any shape and any dtype as wide as that of the pages; a
                multiple of the size of a page. Its first page is not allocated.
        """
        memory = memory.as_strided((memory.numel(),), (1,)).view(self.pages.dtype)
        self.pages = memory.view(-1, *self.pages.shape[1:])
        self.max_pages = len(self.pages) - 1
        self.free = FreePages.all_of(self.max_pages, self.device)


class GrantedCache(PagedKVCache):
    """Paged cache of a model that was retrofitted with DMS.

    Args:
        pool: Pool of the pages.
        spec: Specification of the model.
        sizes: Sizes of the cache.
        windows: Tokens that a query reads in each layer, its own included; None for all.

    Attributes:
        specs: Specification of each layer; None for a layer with a window.
        sinks: For each layer, logits [query heads] in the denominators of the softmax; None for
            none.
    """

    pool: GrantedPool

    def __init__(
        self, pool: GrantedPool, spec: DMSSpec, sizes: CacheSizes, windows: list[int | None]
    ) -> None:
        policy = with_windows(DMSPolicy(spec.window, spec.governing_shift), "dms", windows)
        super().__init__(pool, policy, sizes)
        self.specs = [spec if window is None else None for window in windows]
        self.sinks: list[Tensor | None] = [None] * sizes.layers
        self._reserves = False  # the scheduler has granted the pages
        self._row_numbers = torch.arange(sizes.rows, device=pool.device)

    @property
    def is_bound(self) -> bool:
        """Return whether the pool has pages."""
        return self.pool.max_pages > 0

    def attend(self, layer: int, token: Step, output: Tensor) -> None:
        """Store one token per sequence and write its attention; may be captured after one call.

        Args:
            layer: Layer number.
            token: The tokens, without signals.
            output: [b, query heads, d]; written, and 0 where the row is -1.
        """
        kernels, cache, d = dispatch.triton_kernels(), self.view(layer), token.query.shape[-1]
        query = kernels.append(token, cache, self._rule_at(layer, self.specs[layer], d))
        memory = self._workspace(query, cache)
        sinks = self.sinks[layer]
        kernels.attend(query, cache, token.rows, d**-0.5, memory, output, sinks=sinks)

    def _workspace(self, query: Tensor, cache: PagedCache) -> AttentionWorkspace:
        """Return scratch memory; sizes are powers of two, because a batch may have any size."""
        size = 1 << (len(query) - 1).bit_length()
        if size not in self._memory:
            most = query.new_empty(size, *query.shape[1:])
            kernels = dispatch.triton_kernels()
            self._memory[size] = kernels.attention_workspace(most, cache, evicts=True)
        return self._memory[size]

    def free_row(self, row: int) -> None:
        """Release all pages of a row; the host does not wait."""
        self.free(self._row_numbers[row : row + 1])

    def held_pages(self, rows: Tensor) -> Tensor:
        """Return the pages that rows hold in all layers, int32 [b]; -1 after a fault.

        Args:
            rows: int64 [b].
        """
        pages = self.lists.pages(self.lists.lengths[:, rows]).sum((0, 2), dtype=torch.int32)
        return torch.where(self.pool.free.fault > 0, -1, pages)


class GrantedLocalCache(GrantedCache, LocalPagedCache):
    """The same for a model in which some layers have a sliding window."""


def granted_cache(
    pool: GrantedPool, spec: DMSSpec, sizes: CacheSizes, windows: list[int | None]
) -> GrantedCache:
    """Build the cache of a model; see `GrantedCache`."""
    kind = GrantedLocalCache if any(windows) else GrantedCache
    return kind(pool, spec, sizes, windows)
