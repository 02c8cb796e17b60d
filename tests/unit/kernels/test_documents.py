"""Packed documents: each backend against a loop over documents that are attended alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dms_train.kernels.errors import KernelError
from dms_train.kernels.train_attention import blockwise, reference
from dms_train.kernels.train_attention.documents import document_of, document_slices

BACKENDS = {"blockwise": blockwise.dms_attention, "reference": reference.dms_attention}
PACKS = ([0, 40], [0, 1, 40], [0, 7, 7, 30, 39, 40], [0, 0, 20, 40, 40], [0, 13, 26, 40])
HEADS = ((4, 2), (3, 3))


def leaves_of(heads: tuple[int, int], length: int = 40) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(heads))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (hq, hk), d = heads, 6
    log_keep = -4 * torch.rand(1, hk, length, generator=generator, dtype=torch.float64)
    log_keep[log_keep > -1] = 0.0
    leaves = [*(normal(1, length, h, d) for h in (hq, hk, hk)), log_keep]
    return [x.requires_grad_() for x in leaves], normal(1, length, hq, d)


def alone(leaves: list[Tensor], bounds: list[int], window: int, *, biased: bool) -> Tensor:
    """Every document through the reference, without the others."""
    q, k, v, log_keep = leaves
    parts = [
        reference.dms_attention(
            *(x[:, first:last] for x in (q, k, v)),
            log_keep[..., first:last] if biased else None,
            window,
            0.4,
        )
        for first, last in pairwise(bounds)
        if first < last
    ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bounds", PACKS, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_document_sees_itself_only(
    name: str, bounds: list[int], heads: tuple[int, int], window: int, biased: bool
) -> None:
    leaves, d_out = leaves_of(heads)
    wanted = leaves if biased else leaves[:3]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    q, k, v, log_keep = leaves
    ours = BACKENDS[name](q, k, v, log_keep if biased else None, window, 0.4, cu_seqlens)
    theirs = alone(leaves, bounds, window, biased=biased)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(ours, wanted, d_out)
    for a, b in zip(gradients, torch.autograd.grad(theirs, wanted, d_out), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_documents_are_not_one_long_text() -> None:
    leaves, _ = leaves_of((4, 2))
    packed = reference.dms_attention(*leaves, 5, 0.4, torch.tensor([0, 13, 40], dtype=torch.int32))
    whole = reference.dms_attention(*leaves, 5, 0.4)
    assert torch.equal(packed[:, :13], whole[:, :13])
    assert not torch.allclose(packed[:, 13:], whole[:, 13:])


@pytest.mark.parametrize("bounds", PACKS, ids=str)
def test_numbers_and_slices_name_the_same_positions(bounds: list[int]) -> None:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    numbers = document_of(cu_seqlens, 40).tolist()
    assert numbers == [sum(end <= i for end in bounds[1:]) for i in range(40)]
    places = [(s.start, s.stop) for s in document_slices(cu_seqlens, 40)]
    assert places == [p for p in pairwise(bounds) if p[0] < p[1]]


@pytest.mark.parametrize("bounds", [[], [0], [0, 39], [1, 40], [0, 30, 20, 40], [0, 41]], ids=str)
def test_bounds_that_miss_positions_are_refused(bounds: list[int]) -> None:
    with pytest.raises(KernelError, match="must rise from 0 to the length, 40"):
        document_slices(torch.tensor(bounds, dtype=torch.int32), 40)


@pytest.mark.parametrize("name", BACKENDS)
def test_several_samples_cannot_be_packed(name: str) -> None:
    leaves, _ = leaves_of((4, 2))
    two = [torch.cat([x, x]) for x in leaves]
    with pytest.raises(KernelError, match="cu_seqlens with 2 samples"):
        BACKENDS[name](*two, 5, 0.4, torch.tensor([0, 40], dtype=torch.int32))
