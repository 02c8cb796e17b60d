"""Sizes of a paged cache."""

from __future__ import annotations

from typing import NamedTuple


class CacheSizes(NamedTuple):
    """Sizes of a paged cache.

    Attributes:
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
        group: Query heads of each KV head.
        longest: Most tokens of a sequence.
    """

    layers: int
    rows: int
    heads: int
    group: int
    longest: int
