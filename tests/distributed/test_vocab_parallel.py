"""Losses on a vocabulary spread over tensor-parallel ranks equal those on the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dms_train.method import losses
from tests.support import launch
from tests.support import vocab_worker as worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PLAIN = {
    "teacher_student": losses.kl_teacher_student,
    "student_teacher": losses.kl_student_teacher,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocab")
    launch.checked(launch.torchrun(4, "-m", "tests.support.vocab_worker", str(out), timeout=500))
    return out


def shards(folder: Path, tp: int, case: str) -> list[tuple[Tensor, Tensor]]:
    """(loss, gradient) of every rank of the first tensor-parallel group."""
    files = [load_file(folder / f"tp{tp}-dp0-rank{rank}.safetensors") for rank in range(tp)]
    return [(file[f"{case}.loss"], file[f"{case}.gradient"]) for file in files]


def expected(loss: str, vocab: int, dtype: str) -> tuple[Tensor, Tensor]:
    """From the whole vocabulary in float64: loss per position and gradient."""
    student = worker.logits(0, vocab, dtype)[..., :vocab].double().requires_grad_()
    teacher = worker.logits(0 if loss == "same" else 1, vocab, dtype)[..., :vocab].double()
    if loss == "lm":
        target = worker.labels(vocab).t().flatten()
        value = F.cross_entropy(student.flatten(0, 1), target, reduction="none").view(5, 3)
    else:
        value = PLAIN["teacher_student" if loss == "same" else loss](student, teacher)
    (value * worker.weights()).sum().backward()
    assert student.grad is not None
    return value.detach(), F.pad(student.grad, (0, worker.WIDTH - vocab))


@pytest.mark.parametrize("dtype", worker.DTYPES)
@pytest.mark.parametrize("vocab", worker.VOCABULARIES)
@pytest.mark.parametrize("loss", worker.LOSSES)
@pytest.mark.parametrize("tp", worker.TP_SIZES)
def test_sharded_loss_and_gradient_equal_the_whole(
    folder: Path, tp: int, loss: str, vocab: int, dtype: str
) -> None:
    ranks = shards(folder, tp, f"{loss}-{vocab}-{dtype}")
    value, gradient = expected(loss, vocab, dtype)
    for rank_value, rank_gradient in ranks:
        assert rank_value.dtype == torch.float32
        assert torch.equal(rank_value, ranks[0][0])
        assert rank_gradient.dtype == worker.DTYPES[dtype]
    got = torch.cat([rank_gradient for _, rank_gradient in ranks], dim=-1).double()
    difference = (ranks[0][0] - value).abs().max().item()
    print(f"tp{tp} {loss} {vocab} {dtype}: {difference:.1e}, {(got - gradient).abs().max():.1e}")
    assert difference < 1e-5
    # in 16 bits: stored, weighted with a rounded weight, and rounded again
    relative = 3 * 2**-8 if dtype == "bf16" else 1e-5
    torch.testing.assert_close(got, gradient, rtol=relative, atol=1e-5)
    assert (got[..., vocab:] == 0).all()


@pytest.mark.parametrize("tp", worker.TP_SIZES)
def test_divergence_of_a_distribution_from_itself_is_zero(folder: Path, tp: int) -> None:
    for vocab in worker.VOCABULARIES:
        for value, gradient in shards(folder, tp, f"same-{vocab}-fp32"):
            assert value.abs().max() < 1e-5
            assert gradient.abs().max() < 1e-6


def test_data_parallel_groups_do_not_mix(folder: Path) -> None:
    first, second = (load_file(folder / f"tp2-dp{dp}-rank0.safetensors") for dp in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
