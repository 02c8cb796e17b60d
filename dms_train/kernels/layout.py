"""How a compact cache lies in memory, as a kernel sees it: tensors only, no behaviour.

Shape letters: b sequences, h KV heads, p pages of the longest list, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CompactLayout(NamedTuple):
    """One layer's cache.

    The tokens of a (sequence, KV head) fill slots 0 .. length - 1 of its page list without holes,
    in no particular order: keys carry their RoPE rotation. Slot s lies in page
    `page_table[b, h, s // page_slots]` at offset `s % page_slots`; page P lies in slab
    `P // slab_pages` at `P % slab_pages`. All layers share the slabs.

    Attributes:
        key_slabs: By slab number, [slab_pages, page_slots, d]; None where no slab is open. A
            kernel gets at them through a tensor of their addresses.
        value_slabs: Likewise.
        page_table: int64 [b, h, p], -1 behind the end of a list.
        lengths: int64 [b, h], live slots.
        key_scale: float32 [h] multiplied onto keys read from an FP8 pool; None means 1.
        value_scale: Likewise for values.
    """

    key_slabs: tuple[Tensor | None, ...]
    value_slabs: tuple[Tensor | None, ...]
    page_table: Tensor
    lengths: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
