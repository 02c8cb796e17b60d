"""The FlexAttention backend without its compiler: torch evaluates the same functions eagerly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from dms_train.kernels.errors import KernelError
from dms_train.kernels.train_attention import flex, reference
from dms_train.kernels.train_attention.documents import document_of


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield
    flex._causal_mask.cache_clear()


def problem(b: int, heads: tuple[int, int], length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    (hq, hk), d = heads, 16
    log_keep = -4 * torch.rand(b, hk, length, generator=generator)
    log_keep[log_keep > -1] = 0.0
    log_keep[log_keep < -3] = float("-inf")
    return [*(torch.randn(b, length, h, d, generator=generator) for h in (hq, hk, hk)), log_keep]


@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_it_computes_the_reference(length: int, heads: tuple[int, int], window: int) -> None:
    leaves = problem(2, heads, length)
    ours = flex.dms_attention(*leaves, window, 0.37)
    theirs = reference.dms_attention(*leaves, window, 0.37)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("bounds", [[0, 300], [0, 5, 128, 300], [0, 129, 129, 290, 300]], ids=str)
def test_it_keeps_documents_apart(bounds: list[int], biased: bool) -> None:
    leaves = problem(1, (4, 2), 300)
    leaves[3:] = leaves[3:] if biased else [None]  # type: ignore[list-item]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    ours = flex.dms_attention(*leaves, 9, 0.37, cu_seqlens)
    theirs = reference.dms_attention(*leaves, 9, 0.37, cu_seqlens)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bounds", [[0, 700], [0, 5, 128, 700], [0, 129, 384, 512, 640, 700]])
def test_a_block_is_listed_as_what_its_elements_are(bounds: list[int]) -> None:
    length, edge = bounds[-1], 128
    documents = document_of(torch.tensor(bounds, dtype=torch.int32), length)
    i = torch.arange(length)
    dense = (i <= i[:, None]) & (documents == documents[:, None])
    padded = torch.zeros(6 * edge, 6 * edge, dtype=torch.bool)
    padded[:length, :length] = dense
    blocks = padded.view(6, edge, 6, edge).transpose(1, 2).flatten(2)
    mask = flex.document_mask(documents)
    listed = {"partial": set(), "whole": set()}
    for row in range(6):
        for name, count, index in (
            ("partial", mask.kv_num_blocks, mask.kv_indices),
            ("whole", mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            columns = index[0, 0, row, : count[0, 0, row]].tolist()
            listed[name] |= {(row, column) for column in columns}
    whole, some = blocks.all(-1), blocks.any(-1)
    assert listed["whole"] == {tuple(x) for x in whole.nonzero().tolist()}
    assert listed["partial"] == {tuple(x) for x in (some & ~whole).nonzero().tolist()}


def test_masks_are_built_once() -> None:
    device = torch.device("cpu")
    assert flex._block_mask(300, device, None) is flex._block_mask(300, device, None)
    bounds = torch.tensor([0, 5, 300], dtype=torch.int32)
    first = flex._block_mask(300, device, bounds)
    assert flex._block_mask(300, device, bounds) is first
    bounds[1] = 200
    second = flex._block_mask(300, device, bounds)
    assert second is not first
    assert not torch.equal(second.kv_num_blocks, first.kv_num_blocks)


def test_a_gradient_on_a_cpu_is_refused_in_one_line() -> None:
    leaves = problem(1, (4, 2), 20)
    leaves[3].requires_grad_()
    with pytest.raises(KernelError, match="no backward pass on a CPU; use kernels=auto"):
        flex.dms_attention(*leaves, 9, 0.37)
    with torch.no_grad():
        assert flex.dms_attention(*leaves, 9, 0.37).isfinite().all()


@pytest.mark.parametrize("biased", [True, False])
def test_sinks_take_their_part_of_every_softmax(biased: bool) -> None:
    leaves = problem(1, (4, 2), 150)
    leaves[3:] = leaves[3:] if biased else [None]  # type: ignore[list-item]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0])
    ours = flex.dms_attention(*leaves, 9, 0.37, sinks=sinks)
    theirs = reference.dms_attention(*leaves, 9, 0.37, sinks=sinks)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
