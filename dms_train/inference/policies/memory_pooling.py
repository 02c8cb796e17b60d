"""Fixed memory pooling: every `cr` tokens become one (DMC paper, arXiv:2403.09636).

This is Dynamic Memory Compression without decisions. A token starts a cache entry if its position
is a multiple of `cr`. Other tokens are averaged into the previous entry, with equal weights. Keys
are averaged before RoPE, and the entry has the position of its newest token, as in NVIDIA's code of
the method at d36bf8d533 (A-DMC3). A query reads the unfinished entry of its own token. Prompts are
computed one token at a time, because each token changes an entry that the next query reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, Merge, PolicyKind, RequestSizes, Slots
from dms_train.inference.policies.rotation import moved_by
from dms_train.limits import AtLeast, Below


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoolingOptions:
    """Options of `memory_pooling`.

    Attributes:
        cr: Tokens of an entry, a whole number.
    """

    cr: Annotated[float | None, AtLeast(1), Below(2**31)] = None

    def check(self, path: str) -> Iterator[str]:
        """Yield an error line if there is no ratio, or if it is not a whole number."""
        if self.cr is None:
            yield "needs cr, the tokens of a cache entry"
        elif self.cr != int(self.cr):
            yield f"cr={self.cr}: use a whole number"


class MemoryPoolingPolicy(CachePolicy):
    """Memory pooling; it needs no state, because an entry has the position of its newest token."""

    needs_content = True
    evicts_prompt_only = False

    def __init__(self, options: MemoryPoolingOptions) -> None:
        self._size = int(options.cr or 1)

    def max_tokens(self, request: RequestSizes, computed: int) -> int:
        """Return 1."""
        return 1

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """Return the tokens that a later token of their entry replaces."""
        position = slots.position[:, :, None, :]
        return (position < at[:, None, :, None]) & ((position + 1) % self._size != 0)

    def merge(self, slots: Slots, evicted: Tensor) -> Merge | None:
        """Average the open entry and the arriving token."""
        sequences = slots.sequences
        assert sequences is not None
        assert sequences.frequency is not None
        assert slots.key is not None
        source = evicted.nonzero()
        if not len(source):
            return None
        b, h, slot = source.unbind(1)
        newest = (slots.position == (sequences.end - 1)[:, None, None]).int().argmax(-1)[b, h]
        heads, count = slots.position.shape[1:]
        taken = slots.position[b, h, slot] % self._size + 1  # tokens of the open entry
        wide = torch.promote_types(slots.key.dtype, torch.float32)
        share = taken.to(wide) / (taken + 1)
        scale = torch.ones_like(slots.position, dtype=wide)
        scale[b, h, newest] = 1 - share
        target = (b * heads + h) * count + newest
        one = torch.ones_like(taken)
        return Merge(
            source=(b * heads + h) * count + slot,
            target=target,
            key_weight=share,
            value_weight=share,
            key_scale=scale,
            value_scale=scale,
            source_key=moved_by(slots.key[b, h, slot], one, sequences.frequency),
        )


POLICY = PolicyKind(MemoryPoolingOptions, lambda options, spec: MemoryPoolingPolicy(options))
