"""Pictures of numbers by layer and KV head, for sinks that accept pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

_CELL = 12  # pixels a side of one KV head


def is_by_head(value: object) -> bool:
    """Return whether a metric is a table [layers][KV heads] rather than a number."""
    rows = list | tuple
    return isinstance(value, rows) and bool(value) and isinstance(value[0], rows)


def pixels(shares: Sequence[Sequence[float]]) -> Any:
    """Draw shares from 0 (black) to 1 (white) as uint8 [height, width], layers downwards."""
    levels = numpy.clip(numpy.asarray(shares, dtype=numpy.float64), 0, 1) * 255
    return numpy.kron(levels.round().astype(numpy.uint8), numpy.ones((_CELL, _CELL), numpy.uint8))
