"""The compiled FlexAttention backend against the reference in float64, gradients included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dms_train.kernels.train_attention import flex, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def leaves_of(b: int, heads: tuple[int, int], length: int, dtype: torch.dtype) -> list[Tensor]:
    """Leaves q, k, v and log_keep; some bits are kept for certain, some gone for certain."""
    generator = torch.Generator("cuda").manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    (hq, hk), d = heads, 64
    log_keep = torch.nn.functional.logsigmoid(normal(b, hk, length) * 4)
    log_keep[log_keep > -0.05] = 0.0
    log_keep[log_keep < -8] = float("-inf")
    leaves = [normal(b, length, h, d).to(dtype) for h in (hq, hk, hk)]
    return [x.requires_grad_() for x in (*leaves, log_keep)]


def assert_near_the_reference(
    leaves: list[Tensor], window: int, cu_seqlens: Tensor | None, tolerance: float
) -> None:
    d_out = torch.randn_like(leaves[0])
    out = flex.dms_attention(*leaves, window, 0.125, cu_seqlens)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = reference.dms_attention(*exact, window, 0.125, cu_seqlens)
    theirs = [out.detach(), *torch.autograd.grad(out, exact, d_out.double())]
    for name, a, b in zip(("o", "dq", "dk", "dv", "dlog_keep"), ours, theirs, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize(
    ("b", "heads", "length", "window"),
    [(2, (4, 2), 300, 16), (1, (6, 1), 1024, 256), (1, (3, 3), 513, 1)],
)
def test_output_and_gradients(
    b: int, heads: tuple[int, int], length: int, window: int, dtype: torch.dtype, tolerance: float
) -> None:
    assert_near_the_reference(leaves_of(b, heads, length, dtype), window, None, tolerance)


@pytest.mark.parametrize("bounds", [[0, 700], [0, 5, 128, 400, 400, 700]], ids=str)
def test_packed_documents(bounds: list[int]) -> None:
    leaves = leaves_of(1, (4, 2), 700, torch.bfloat16)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    assert_near_the_reference(leaves, 16, cu_seqlens, 2e-2)


def test_a_new_window_and_length_do_not_exhaust_the_compiler() -> None:
    for window in range(3, 15):
        leaves = leaves_of(1, (4, 2), 128 * window - 5, torch.bfloat16)
        assert_near_the_reference(leaves, window, None, 2e-2)
