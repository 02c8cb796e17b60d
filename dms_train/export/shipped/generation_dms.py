"""Cache of `generate` that frees what Dynamic Memory Sparsification (DMS) evicts.

This file is shipped with the weights and needs only torch and transformers (4.57 or later). If the
package that wrote it is installed too, its kernels decode on GPUs.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_dms import DMSNumbers
from .pages_dms import NewTokens, Pages
from .pool_dms import PagePool

__all__ = ["DMSCache"]

KERNELS = ("auto", "triton", "reference")
_PACKAGE = "dms_train.inference.export_pages"  # has the kernels; may be absent
# transformers 4 says how many tokens `crop` keeps, transformers 5 how many it removes
_CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters


class _Layer(CacheLayerMixin):
    """Layer interface of transformers' caches; keys and values are in its store."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.store: Any = None

    def lazy_initialization(self, *args: Any) -> None:
        """Prepare nothing."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise ValueError, because evicted keys cannot be returned."""
        raise ValueError("a DMSCache serves DMS attention only")

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Return length and offset of the mask; query is a length or a tensor of positions."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_seq_length(self, *args: Any) -> int:
        """Number of tokens seen, padding and evicted ones included."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Drop all tokens."""
        self.length, self.store = 0, None

    def replace(self, store: Any) -> None:
        """Release the pages of the old store and use another one."""
        self.store.free(torch.arange(self.store.rows, device=self.store.pool.device))
        self.store = store


def _cache_layer(numbers: DMSNumbers | None) -> Any:
    """Make the empty layer of a cache; one of linear attention has no constants."""
    if numbers is not None:
        return _Layer()
    from transformers.cache_utils import LinearAttentionLayer  # absent in older versions

    return LinearAttentionLayer()


class _Columns(NamedTuple):
    """Tokens of one forward pass.

    Attributes:
        mask: Mask that the attention layers received.
        start: Number of tokens before the pass.
        real: bool [batch, T], False for padding.
        holes: Whether padding follows a token of the same sequence. False if no kernels are used.
    """

    mask: Tensor
    start: int
    real: Tensor
    holes: bool


class DMSCache(Cache):
    """Cache that frees evicted tokens. Memory comes from one pool per device.

    Evicted tokens cannot return: `crop` raises ValueError if the remaining tokens need one.

    Args:
        numbers: Constants of the model, or of each of its layers; None for a layer with linear
            attention, whose state transformers keeps.
        layers: Number of layers.
        kernels: `triton` computes with the kernels of the package, `reference` with torch
            operations; `auto` uses the kernels on a GPU if the package is installed.

    Raises:
        ValueError: `kernels` is something else.
    """

    def __init__(
        self,
        numbers: DMSNumbers | list[DMSNumbers | None],
        layers: int,
        kernels: str = "auto",
    ) -> None:
        if kernels not in KERNELS:
            raise ValueError(f"kernels={kernels!r}: choose one of {', '.join(KERNELS)}")
        self._numbers = numbers if isinstance(numbers, list) else [numbers] * layers
        super().__init__(layers=[_cache_layer(own) for own in self._numbers])
        self._kernels = kernels
        self._real: Tensor | None = None  # bool [batch, T] of all tokens seen
        self._columns: _Columns | None = None  # of the newest forward pass

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pools now, without page tables."""
        pools = {id(store.pool): store.pool for store in self._stores()}
        return sum(pool.allocated_bytes for pool in pools.values())

    def live(self) -> Tensor:
        """Count the tokens held, int64 [layers, batch, kv_heads]; 0 with linear attention.

        Raises:
            ValueError: The cache is empty.
        """
        if not self._stores():
            raise ValueError("the cache holds no tokens yet, so its batch size is not known")
        counts = iter([s.live(torch.arange(s.rows))[0].cpu() for s in self._stores()])
        held = [None if numbers is None else next(counts) for numbers in self._numbers]
        empty = torch.zeros_like(next(count for count in held if count is not None))
        return torch.stack([empty if count is None else count for count in held])

    def attend(
        self,
        layer: int,
        query: Tensor,
        tokens: tuple[Tensor, ...],
        mask: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store tokens, drop evicted ones, attend.

        Args:
            layer: Layer number.
            query: [batch, heads, T, d] with RoPE applied.
            tokens: Keys and values, [batch, kv_heads, T, d], and decisions,
                bool [batch, kv_heads, T].
            mask: 4D; its last row is True, or 0 in an additive mask, for columns without padding.
            sinks: Logits [heads] in the denominators of the softmax; None for none.

        Returns:
            [batch, heads, T, d].
        """
        ours = self.layers[layer]
        batch, heads, n, _ = query.shape
        key, value, decisions = tokens
        columns = self._enter(mask, ours.length, batch, n)
        numbers = self._numbers[layer]
        assert numbers is not None
        if ours.store is None:
            ours.store = self._open(key, columns, numbers, sinks)
        if columns.holes and not isinstance(ours.store, Pages):
            raise ValueError(
                "the kernels accept padding only before a sequence; remove padding between tokens, "
                "or set model.dms_kernels='reference' before generate()"
            )
        position = torch.arange(ours.length, ours.length + n, device=query.device)
        position = torch.where(columns.real.to(query.device), position, -1)
        rows = torch.arange(batch, device=query.device)
        # older versions of the package have kernels without sinks
        own = {} if sinks is None else {"sinks": sinks}
        outputs, size = [], ours.store.queries_at_once(batch * heads, ours.length + n)
        for first in range(0, n, size):
            part = slice(first, first + size)
            chunk = NewTokens(
                position[:, part], key[:, :, part], value[:, :, part], decisions[:, :, part]
            )
            outputs.append(ours.store.attend(0, rows, query[:, :, part], chunk, **own).output)
        ours.length += n
        return torch.cat(outputs, 2)

    def reset(self) -> None:
        """Drop all tokens; the next batch may have another size."""
        self.layers = [_cache_layer(own) for own in self._numbers]
        self._real = self._columns = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens; the argument means what it means to a DynamicCache.

        Args:
            tokens_to_remove: If negative, the number of tokens to remove, negated. Otherwise, in
                transformers 4, the number of first tokens to keep.

        Raises:
            ValueError: A later query would read a token that was evicted since, or the kernels
                hold the tokens without their positions, or a layer has linear attention, or, in
                transformers 5, the number is positive. The cache is unchanged.
        """
        length = self.get_seq_length()
        stay = _tokens_left(tokens_to_remove, length)
        if stay == length:
            return
        if stay == 0:
            self.reset()
            return
        if None in self._numbers:
            raise ValueError(
                "crop of a DMSCache: the states of linear attention cannot return to an earlier "
                "token; reset() and compute the tokens again"
            )
        if not all(isinstance(store, Pages) for store in self._stores()):
            raise ValueError(
                "crop of a DMSCache: the kernels do not keep the positions of tokens; set "
                "model.dms_kernels='reference' before generate()"
            )
        assert self._real is not None
        gone = sum(store.missing(self._real, stay) for store in self._stores())
        if gone:
            raise ValueError(
                f"crop of a DMSCache from {length} to {stay} tokens: {gone} slots are needed whose "
                "tokens were evicted since; remove fewer tokens, reset() and compute them "
                "again, or pass past_key_values=DynamicCache(), which keeps evicted tokens"
            )
        for layer in self.layers:
            layer.replace(layer.store.cropped(stay))
            layer.length = stay
        self._real, self._columns = self._real[:, :stay], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row beam_idx[i], int64 [batch]."""
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, copies next to each other."""
        if self._real is not None:
            self._take(torch.arange(len(self._real)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that indices or a mask select."""
        if self._real is not None:
            self._take(torch.arange(len(self._real), device=indices.device)[indices])

    def _take(self, rows: Tensor) -> None:
        """Replace the rows of the batch by copies of `rows`, int64 [new batch]."""
        if self._real is None or torch.equal(rows.cpu(), torch.arange(len(self._real))):
            return
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.replace(layer.store.taken(rows.to(layer.store.pool.device)))
            else:
                layer.reorder_cache(rows)
        self._real, self._columns = self._real[rows.to(self._real.device)], None

    def _stores(self) -> list[Any]:
        stores = [getattr(layer, "store", None) for layer in self.layers]
        return [store for store in stores if store is not None]

    def _enter(self, mask: Tensor, start: int, batch: int, n: int) -> _Columns:
        """Describe the columns of a forward pass, once for all layers.

        Raises:
            ValueError: The cache holds another number of sequences.
        """
        known = self._columns
        if known is not None and known.mask is mask and known.start == start:
            return known
        last = mask[:, 0, -1, -n:]
        real = (last if last.dtype == torch.bool else last == 0).expand(batch, -1)
        before = real[:, :0] if self._real is None else self._real[:, :start].to(real.device)
        if len(before) != batch:
            raise ValueError(
                f"the DMSCache holds {len(before)} sequence(s), {batch} arrive; call its "
                "batch_repeat_interleave or batch_select_indices first"
            )
        self._real = torch.cat([before, real], 1)
        begun = before.any(1, keepdim=True) | (real.cumsum(1) > 0)
        watched = self._kernels == "triton" or (self._kernels == "auto" and real.is_cuda)
        holes = watched and bool((begun & ~real).any())  # the only place where the host waits
        self._columns = _Columns(mask, start, real, holes)
        return self._columns

    def _open(
        self, key: Tensor, columns: _Columns, numbers: DMSNumbers, sinks: Tensor | None
    ) -> Any:
        """Make an empty store for one layer."""
        batch, heads, _, size = key.shape
        window, shift = numbers.window, numbers.shift
        pools = (store.pool for store in self._stores())
        pool = next((pool for pool in pools if pool.device == key.device), None)
        package = None if columns.holes else _kernels_for(self._kernels, key, sinks)
        if package is not None:
            return package.open_pages(key, window=window, shift=shift, pool=pool)
        pool = pool or PagePool(head_size=size, dtype=key.dtype, device=key.device)
        return Pages(pool, window=window, shift=shift, rows=batch, heads=heads)


def _kernels_for(wanted: str, key: Tensor, sinks: Tensor | None) -> Any:
    """Return the package's module with kernels for these keys and sinks, or None.

    Raises:
        ValueError: `wanted` is `triton` and there are no kernels.
    """
    if wanted == "reference" or (wanted == "auto" and not key.is_cuda):
        return None
    try:
        package = importlib.import_module(_PACKAGE)
    except ImportError:
        package = None
    known = () if package is None else inspect.signature(package.ExportPages.attend).parameters
    if package is not None and package.supports(key) and (sinks is None or "sinks" in known):
        return package
    if wanted == "triton":
        raise ValueError(
            f"kernels=triton: dms-train has no kernels here for {key.dtype} on {key.device}; "
            "install its newest version with triton, and use float32, bfloat16 or float16 on a "
            "GPU, or kernels=auto"
        )
    return None


def _tokens_left(given: int, length: int) -> int:
    """Number of tokens that stay after `crop(given)`."""
    if given < 0:
        return max(0, length + given)
    if not _CROP_REMOVES:
        return min(given, length)
    if given > 0:
        raise ValueError(f"crop({given}): must be negative, for example crop(-{given})")
    return length
