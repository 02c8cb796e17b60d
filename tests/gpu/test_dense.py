"""Attention without evictions on a GPU: torch's fused kernels, which keep no scores in memory."""

from __future__ import annotations

import pytest
import torch

from dms_train.kernels.train_attention import dense, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("d", [64, 100, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)],
)
def test_it_is_the_reference_without_a_bias(dtype: torch.dtype, tolerance: float, d: int) -> None:
    q, k, v = (torch.randn(2, 300, h, d, device="cuda").to(dtype) for h in (6, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    d_out = torch.randn_like(q)
    out = dense.causal_attention(*leaves, 0.1)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = reference.dms_attention(*exact, None, 1, 0.1)
    theirs = [out.detach(), *torch.autograd.grad(out, exact, d_out.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_grows_with_the_length_not_its_square(dtype: torch.dtype) -> None:
    length, hq, hk, d = 8192, 8, 2, 64
    leaves = [
        torch.randn(1, length, h, d, device="cuda", dtype=dtype, requires_grad=True)
        for h in (hq, hk, hk)
    ]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dense.causal_attention(*leaves, 0.1).sum().backward()
    scores = hq * length**2 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < scores / 4
