"""Residual addition with RMSNorm, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dms_train.kernels import dispatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if not dispatch.is_supported(DEVICE):
    pytest.skip("needs triton", allow_module_level=True)

triton_norm = pytest.importorskip("dms_train.kernels.layers.triton_norm")

EPSILON = 1e-3


@pytest.mark.parametrize(("t", "c"), [(1, 1), (3, 64), (2, 130), (5, 2048), (2, 9000)])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_the_sum_and_its_norm(t: int, c: int, dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(t + c)
    residual, update = torch.randn(2, t, c, device=DEVICE).to(dtype)
    weight = torch.randn(c, device=DEVICE).to(dtype)
    kept = residual.clone()
    total, normed = triton_norm.add_norm(residual, update, weight, EPSILON)
    assert torch.equal(residual, kept)
    assert torch.equal(total, residual + update)
    expected = F.rms_norm(total.double(), (c,), weight.double(), EPSILON)
    torch.testing.assert_close(normed.double(), expected, rtol=share, atol=share)
    assert normed.dtype == dtype
