"""Paged cache for `generate()` of an export, one layer at a time.

The modelling code of an export (`export/shipped/generation_dms.py`) loads this module if this
package is installed. It passes tokens with RoPE applied and with padding before the texts. The
cache needs texts without padding. Keep the signatures: exports of older versions call them too.

Shape letters: b sequences, h KV heads, r query heads per KV head, n tokens, d head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_prompt import Chunk
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.policies.base import CachePolicy, NewTokens
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.keep_all import KeepAllPolicy
from dms_train.kernels import dispatch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_TOKENS = 4096  # most tokens of one `attend` of a prompt
_PAGES = 256  # pages of a new pool
_MOST_PAGES = 2**14  # most pages that are allocated at once before they are needed
_STEPS = 128  # steps of a layer to allocate pages for at once, so that the host seldom waits
_ENDLESS = 2**24  # window longer than any sequence; it needs no ring


class ExportTokens(Protocol):
    """Tokens as the code of an export passes them; published exports depend on these names.

    Attributes:
        position: int64 [b, n]; negative for padding.
        key: [b, h, n, d] with RoPE applied.
        value: [b, h, n, d].
        signal: Eviction decisions, bool [b, h, n].
    """

    @property
    def position(self) -> Tensor: ...  # noqa: D102

    @property
    def key(self) -> Tensor: ...  # noqa: D102

    @property
    def value(self) -> Tensor: ...  # noqa: D102

    @property
    def signal(self) -> Tensor | None: ...  # noqa: D102


def supports(key: Tensor) -> bool:
    """Return whether the kernels support the device, dtype and head size of keys [b, h, n, d]."""
    return key.dtype in _DTYPES and key.shape[-1] % 2 == 0 and dispatch.is_supported(key.device)


def open_pages(
    key: Tensor, *, window: int, shift: int, pool: GrowingPool | None = None
) -> ExportPages:
    """Create an empty cache for one layer.

    Args:
        key: [b, h, n, d], of the shape, dtype and device of the keys to store.
        window: Distance up to which a token is always read.
        shift: Distance from a token to the decision that governs it.
        pool: Pool of another layer on the same device; None creates one.
    """
    rows, heads, _, size = key.shape
    policy = KeepAllPolicy() if window > _ENDLESS else DMSPolicy(window, shift)
    if pool is None:
        pool = GrowingPool(
            head_size=size, dtype=key.dtype, device=key.device, page_slots=16, pages=_PAGES
        )
    return ExportPages(pool, policy, rows=rows, heads=heads)


class GrowingPool(DevicePool):
    """Page pool that allocates more memory when it is full, because lengths are not known before.

    Pages keep their numbers.
    """

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self.pages.nbytes

    def reserve(self, count: int) -> None:
        """Ensure that kernels can pop `count` free pages from now on."""
        if self._left < count:
            self._ensure(max(count, min(_STEPS * count, _MOST_PAGES)))
        super().reserve(count)

    def _require(self, count: int) -> None:
        if self._left < count:
            self._ensure(count)

    def _ensure(self, count: int) -> None:
        """Ensure `count` free pages by the exact count of the device."""
        if not self._exact:
            self._read()
        if self._left < count:
            self._add(max(count - self._left, self.max_pages // 4))

    def _add(self, count: int) -> None:
        """Allocate `count` more pages; the host must know the exact number of free pages."""
        have, total = self.max_pages + 1, self.max_pages + 1 + count
        wider = self.pages.new_empty(total, *self.pages.shape[1:])
        wider[:have] = self.pages
        self.pages = wider
        numbers = F.pad(self.free.numbers, (0, count))
        put = torch.arange(total - 1, have - 1, -1, dtype=torch.int32, device=self.device)
        numbers[self._left : self._left + count] = put
        self._holders = F.pad(self._holders, (0, count), value=1)
        self.free = self.free._replace(numbers=numbers, holders=self._holders)
        self.free.left.add_(count)
        self.max_pages += count
        self._left += count


class ExportPages(PagedKVCache):
    """Paged cache of one layer.

    Args:
        pool: Pool of the pages.
        policy: Policy that the kernels support.
        rows: Number of sequences.
        heads: Number of KV heads.
    """

    pool: GrowingPool

    def __init__(self, pool: GrowingPool, policy: CachePolicy, *, rows: int, heads: int) -> None:
        super().__init__(pool, policy, CacheSizes(1, rows, heads, group=1, longest=0))
        self.rows = rows
        self._most = 0  # an upper bound of the tokens of each sequence
        self._seen = torch.zeros(rows, dtype=torch.int64, device=pool.device)

    def queries_at_once(self, lists: int, keys: int) -> int:
        """Return the most tokens of one `attend`; fixed, because the kernels store no scores."""
        return _MOST_TOKENS

    def attend(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        arrival: ExportTokens,
        sinks: Tensor | None = None,
    ) -> Attended:
        """Store tokens, drop the evicted ones and compute attention.

        Args:
            layer: 0.
            rows: All rows in ascending order, int64 [b].
            query: [b, h * r, n, d] with RoPE applied and with its eviction channel cleared.
            arrival: The tokens. A negative position marks padding, which must precede the first
                token of a sequence. The values of other positions are not used.
            sinks: Logits [h * r] in the denominators of the softmax; None for none.

        Returns:
            Output [b, h * r, n, d], 0 for padding, and slots attended.
        """
        real = arrival.position >= 0
        self._widen(real.shape[1])
        one = real.shape[1] == 1
        with torch.cuda.device_of(query):  # where Triton launches
            attended = (self._attend_one if one else self._attend_prompt)(
                rows, query, arrival, real, sinks
            )
        self._seen += real.sum(1)
        return attended._replace(output=torch.where(real[:, None, :, None], attended.output, 0))

    def taken(self, rows: Tensor) -> ExportPages:
        """Copy rows, int64 [b], which may repeat, into a new cache on the same pool."""
        heads = self.lists.lengths.shape[2]
        copy = ExportPages(self.pool, self.policy, rows=len(rows), heads=heads)
        copy.lists.lengths, copy._rings = self.lists.lengths[:, rows], self._rings[:, rows]
        copy._seen, copy._most = self._seen[rows], self._most
        copy.lists.tables = torch.zeros_like(self.lists.tables[:, rows])
        used = copy.lists.places() < copy.lists.pages(copy.lists.lengths)[..., None]
        source = self.lists.tables[:, rows][used]
        pages = self.pool.take(len(source))
        self.pool.pages[pages] = self.pool.pages[source]
        copy.lists.tables[used] = pages
        return copy

    def _widen(self, tokens: int) -> None:
        """Widen the page tables for `tokens` more tokens of each sequence."""
        self._most += tokens
        num_pages = self.lists.tables.shape[-1]
        if self._most > num_pages * self.pool.page_slots:
            wanted = (self._most + self._most // 4) // self.pool.page_slots + 1
            self.lists.tables = F.pad(self.lists.tables, (0, wanted - num_pages))

    def _attend_one(
        self,
        rows: Tensor,
        query: Tensor,
        arrival: ExportTokens,
        real: Tensor,
        sinks: Tensor | None,
    ) -> Attended:
        """Compute one token per sequence; the kernel rotates by 0, because RoPE is applied."""
        b, heads, _, d = query.shape
        h = arrival.key.shape[1]
        angle = query.new_zeros(b, 1, 1, 1, d)
        step = AttentionStep(
            query=query.reshape(b, 1, h, heads // h, d).contiguous(),
            key=arrival.key.reshape(b, 1, h, 1, d).contiguous(),
            value=arrival.value.reshape(b, 1, h, 1, d).contiguous(),
            cos=angle + 1,
            sin=angle,
            position=self._seen[:, None],
            rows=torch.where(real[:, 0], rows, -1),
            decision_projection=lambda: _decisions(arrival),
            sinks=sinks,
        )
        return self._decode(0, step)

    def _attend_prompt(
        self,
        rows: Tensor,
        query: Tensor,
        arrival: ExportTokens,
        real: Tensor,
        sinks: Tensor | None,
    ) -> Attended:
        """Compute several tokens per sequence, with padding moved to the end; skip empty rows."""
        some = real.any(1).nonzero()[:, 0]
        order = (~real[some]).int().argsort(dim=1, stable=True)
        count = torch.arange(real.shape[1], device=real.device)
        position = torch.where(
            count < real[some].sum(1, keepdim=True), self._seen[some, None] + count, -1
        )
        moved = NewTokens(
            position,
            _columns(arrival.key[some], order),
            _columns(arrival.value[some], order),
            _columns(_decisions(arrival)[some], order),
        )
        pages = len(some) * arrival.key.shape[1] * self._pages_of(real.shape[1])
        chunk = Chunk(rows[some], _columns(query[some], order), moved, pages, sinks=sinks)
        attended = self._prefill(0, chunk)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        output[some] = _columns(attended.output, order.argsort(1))
        reads = torch.zeros(arrival.key.shape[:2], dtype=torch.int64, device=real.device)
        reads[some] = attended.reads
        return Attended(output, reads)


def _decisions(arrival: ExportTokens) -> Tensor:
    assert arrival.signal is not None
    return arrival.signal


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """Return the columns of x, [b, heads, n] or [b, heads, n, d], in this order, int64 [b, n]."""
    index = order[:, None] if x.dim() == 3 else order[:, None, :, None]
    return x.gather(2, index.expand(x.shape))
