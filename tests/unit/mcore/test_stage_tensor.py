"""Side sums travel between pipeline stages without losing a bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dms_train.mcore.schedule.stage_tensor import (
    EVICTION_STATS,
    StageState,
    pack,
    stage_seq_length,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16]


def hidden(rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, 12, generator=generator).to(dtype)


def eviction_stats() -> Tensor:
    """Values that need all 24 bits of a float32, with several magnitudes and signs."""
    values = torch.randn(4, EVICTION_STATS, generator=torch.Generator().manual_seed(1))
    values[0] = torch.tensor([0.0, 16777215.0, 1 / 3, -7 / 11])
    return values * torch.tensor([[1.0], [1e6], [-1e-6], [123.456]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_teacher", [True, False])
def test_everything_arrives_exactly(dtype: torch.dtype, has_teacher: bool) -> None:
    teacher = hidden(5, dtype, 2) if has_teacher else None
    sent = StageState(hidden(5, dtype), teacher, eviction_stats())
    tensor = pack(sent)
    assert tensor.dtype == dtype
    assert tensor.shape == (stage_seq_length(5, has_teacher=has_teacher, sequence_shards=1), 4, 12)
    got = unpack(tensor, has_teacher=has_teacher)
    assert torch.equal(got.student, sent.student)
    assert got.eviction_stats.dtype == torch.float32
    assert torch.equal(got.eviction_stats, sent.eviction_stats)
    if has_teacher:
        assert got.teacher is not None
        assert torch.equal(got.teacher, teacher)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_side_sums_arrive_exactly(dtype: torch.dtype) -> None:
    student, sums = hidden(5, dtype).requires_grad_(), eviction_stats().requires_grad_()
    sent = pack(StageState(student, hidden(5, dtype, 2), sums))
    received = sent.detach().requires_grad_()  # the next stage's copy
    got = unpack(received, has_teacher=True)
    weights = eviction_stats().flip(0) / 7
    ((got.eviction_stats * weights).sum() + got.student.float().sum() * 3).backward()
    sent.backward(received.grad)
    assert torch.equal(sums.grad, weights)
    assert (student.grad == 3).all()


def test_no_gradient_reaches_the_teacher() -> None:
    received = torch.ones(7, 4, 12, requires_grad=True)
    got = unpack(received, has_teacher=True)
    assert got.teacher is not None
    assert not got.teacher.requires_grad
    (got.student.sum() + got.eviction_stats.sum()).backward()
    assert received.grad is not None
    assert (received.grad[3:6] == 0).all()


def test_announced_length_divides_by_the_sequence_shards() -> None:
    assert stage_seq_length(24, has_teacher=True, sequence_shards=2) // 2 == 12 + 12 + 1
    assert stage_seq_length(24, has_teacher=False, sequence_shards=4) // 4 == 6 + 1
