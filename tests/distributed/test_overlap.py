"""Linear layers that overlap their communication compute the products of one process."""

from __future__ import annotations

import pytest

from tests.support import overlap_cases
from tests.support.ranks import values_of_ranks


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_overlapped_layers_equal_one_product_in_float64() -> None:
    for worst in values_of_ranks(overlap_cases.differences, 2, 2, "fp32", (4, 16), 3):
        assert {"output", "x", "first returned", "second returned"} <= worst.keys()
        assert max(worst.values()) < 1e-6, worst
