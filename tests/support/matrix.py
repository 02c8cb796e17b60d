"""Combinations of options for parametrised tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

FULL_MATRIX = os.environ.get("DMS_FULL_MATRIX") == "1"


def combinations(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations with DMS_FULL_MATRIX=1; by default the fewest that contain every value.

    By default combination i takes value i of every option, and starts over after its last one.
    """
    values = [list(option) for option in options]
    if FULL_MATRIX:
        return list(itertools.product(*values))
    longest = max(map(len, values))
    return [tuple(option[i % len(option)] for option in values) for i in range(longest)]
