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
    launch.checked(launch.workers(4, "tests.support.vocab_worker", str(out), timeout=500))
    return out


def shards(folder: Path, tp: int, case: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, parts of the gradients) of every rank of the first tensor-parallel group."""
    files = [load_file(folder / f"tp{tp}-dp0-rank{rank}.safetensors") for rank in range(tp)]
    names = ("loss", "d_hidden", "d_weight")
    return [tuple(file[f"{case}.{name}"] for name in names) for file in files]


def expected(loss: str, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """From the whole vocabulary in float64: loss per position and gradients."""
    hidden = worker.hidden(0, dtype).double().requires_grad_()
    weight = worker.weight(0, vocab, dtype).double().requires_grad_()
    other = 0 if loss == "same" else 1
    logits = rounded(hidden @ weight[:vocab].t(), dtype)
    teacher = worker.hidden(other, dtype).double() @ worker.weight(other, vocab, dtype).double().t()
    teacher = rounded(teacher[..., :vocab], dtype)
    if loss == "lm":
        target = worker.labels(vocab).t().flatten()
        value = F.cross_entropy(logits.flatten(0, 1), target, reduction="none").view(5, 3)
    else:
        plain = PLAIN["teacher_student" if loss == "same" else loss]
        value = plain(logits, teacher, worker.TEMPERATURES[dtype])
    (value * worker.weights()).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def rounded(logits: Tensor, dtype: str) -> Tensor:
    """As stored by the output layer; the gradient passes through."""
    return logits + (logits.to(worker.DTYPES[dtype]).double() - logits).detach()


@pytest.mark.parametrize("dtype", worker.DTYPES)
@pytest.mark.parametrize("vocab", worker.VOCABULARIES)
@pytest.mark.parametrize("loss", worker.LOSSES)
@pytest.mark.parametrize("tp", worker.TP_SIZES)
def test_sharded_loss_and_gradients_equal_the_whole(
    folder: Path, tp: int, loss: str, vocab: int, dtype: str
) -> None:
    ranks = shards(folder, tp, f"{loss}-{vocab}-{dtype}")
    value, d_hidden, d_weight = expected(loss, vocab, dtype)
    for rank in ranks:
        assert rank[0].dtype == torch.float32
        assert torch.equal(rank[0], ranks[0][0])
        assert rank[1].dtype == rank[2].dtype == worker.DTYPES[dtype]
    found_hidden = torch.stack([rank[1].double() for rank in ranks]).sum(0)
    found_weight = torch.cat([rank[2].double() for rank in ranks])
    # a logit of float32 inputs may be rounded to the other 16-bit neighbour
    torch.testing.assert_close(
        ranks[0][0].double(), value, rtol=0, atol=2e-2 if dtype == "bf16" else 1e-5
    )
    for found, exact in ((found_hidden, d_hidden), (found_weight, d_weight)):
        error = ((found - exact).norm() / exact.norm().clamp(min=1e-3)).item()
        assert error < (1e-2 if dtype == "bf16" else 1e-5)
    assert (found_weight[vocab:] == 0).all()


@pytest.mark.parametrize("dtype", worker.DTYPES)
@pytest.mark.parametrize("tp", worker.TP_SIZES)
def test_divergence_of_a_distribution_from_itself_is_exactly_zero(
    folder: Path, tp: int, dtype: str
) -> None:
    for vocab in worker.VOCABULARIES:
        for parts in shards(folder, tp, f"same-{vocab}-{dtype}"):
            assert all((part == 0).all() for part in parts)


def test_data_parallel_groups_do_not_mix(folder: Path) -> None:
    first, second = (load_file(folder / f"tp2-dp{dp}-rank0.safetensors") for dp in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
