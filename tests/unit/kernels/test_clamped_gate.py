"""The clamped gate equals its formula in float64, and keeps only its input."""

from __future__ import annotations

import torch

from dms_train.kernels.layers.clamped_gate import clamped_swiglu
from tests.support.live_memory import saved_bytes


def test_output_and_gradient_are_those_of_plain_operations() -> None:
    generator = torch.Generator().manual_seed(1)
    x = 6 * torch.randn(4, 3, 2 * 50, dtype=torch.float64, generator=generator)
    x[0, 0, ::10] = 7.0  # the limit itself still has a gradient
    x[0, 1, 50::10] = -7.0
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn(4, 3, 50, dtype=torch.float64, generator=generator)
    gate, up = wanted.chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    expected = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    output = clamped_swiglu(found)
    torch.testing.assert_close(output, expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad, wanted.grad)
    halves = wanted.grad.chunk(2, -1)
    assert all((half == 0).any() and (half != 0).any() for half in halves)  # beyond the limits


def test_only_the_input_is_kept() -> None:
    x = torch.randn(5, 64).requires_grad_()
    assert saved_bytes(lambda: clamped_swiglu(x), []) == x.nbytes
