"""Overlapped linear layers on GPUs, which read one another's memory while they compute."""

from __future__ import annotations

import pytest
import torch

from tests.support import overlap_cases
from tests.support.ranks import values_of_ranks

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    pytest.mark.timeout(400),
]
# Products in TF32 or not; bf16 rounds hidden states, partial sums and their sum.
BARS = {"fp32": 2e-3, "bf16": 3e-2}


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.skipif(GPUS < 4, reason="4"))])
def test_overlapped_layers_equal_one_product_in_float64(tp: int, dtype: str) -> None:
    """Large enough that a transfer would still run if it were not waited for."""
    for worst in values_of_ranks(overlap_cases.differences, tp, tp, dtype, (512, 2048), 30):
        print(f"TP {tp} {dtype}: {worst}")
        assert {"first added", "second added", "first returned"} <= worst.keys()
        assert max(worst.values()) < BARS[dtype]
