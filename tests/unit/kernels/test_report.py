"""The host reads several tensors after a step in one copy."""

from __future__ import annotations

import importlib

import pytest
import torch

from dms_train.kernels import dispatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)


@pytest.mark.parametrize("lengths", [(1, 1, 2050, 6), (1, 1, 1023, 1024, 3), (2,)], ids=str)
def test_parts_follow_each_other_in_the_memory_of_the_host(lengths):
    report = importlib.import_module("dms_train.kernels.decode.triton_report").report_status
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(-9, 9, (n,), generator=draw, dtype=torch.int32) for n in lengths]
    row = torch.full((3, sum(lengths)), 99, dtype=torch.int32)
    if DEVICE.type == "cuda":
        row = row.pin_memory()
    report([part.to(DEVICE) for part in parts], row[1])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
    assert row[1].equal(torch.cat(parts))
    assert (row[[0, 2]] == 99).all()
