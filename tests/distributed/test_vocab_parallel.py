"""Losses on a vocabulary spread over tensor-parallel ranks equal those on the whole of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.vocabulary_losses import (
    Projection,
    distillation_kl,
    next_token_loss,
    support_kl,
    top_logits,
)
from dms_train.mcore.options import ParallelOptions
from dms_train.method import losses
from tests.support.ranks import values_of_ranks
from tests.support.top_logits_cases import merged_divergence

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
TP_SIZES = (2, 4)
WIDTH, HIDDEN = 128, 8
VOCABULARIES = (61, 100, 128)  # with 61 whole shards are padding
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TEMPERATURES = {"fp32": 2.0, "bf16": 1.0}
LOSSES = ("teacher_student", "student_teacher", "same", "lm")
SUPPORT = 40  # larger than a shard of four


def hidden(seed: int, dtype: str) -> Tensor:
    """[s=5, b=3, HIDDEN]."""
    x = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x.to(DTYPES[dtype])


def weight(seed: int, vocab: int, dtype: str) -> Tensor:
    """[WIDTH, HIDDEN] with enormous values in the padding."""
    x = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(10 + seed))
    x[vocab:] = 1e4
    return x.to(DTYPES[dtype])


def labels(vocab: int) -> Tensor:
    """[b, s], the first and the last token among them."""
    x = torch.randint(0, vocab, (3, 5), generator=torch.Generator().manual_seed(5))
    x[0, 0], x[0, 1] = 0, vocab - 1
    return x


def weights() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(6))


def projection(seed: int, vocab: int, dtype: str, view: ParallelView) -> Projection:
    shard = weight(seed, vocab, dtype).chunk(view.tp_size)[view.tp_rank].clone()
    return Projection(hidden(seed, dtype), shard)


def one(loss: str, vocab: int, dtype: str, view: ParallelView) -> dict[str, Tensor]:
    """Loss per position and this rank's parts of the gradients of their weighted sum."""
    student = projection(0, vocab, dtype, view)
    for tensor in student[:2]:
        tensor.requires_grad_()
    if loss == "lm":
        value = next_token_loss(student, labels(vocab), vocab, view.tp_group)
    else:
        teacher = projection(0 if loss == "same" else 1, vocab, dtype, view)
        direction = "teacher_student" if loss == "same" else loss
        divergence = Divergence(direction.removeprefix("stored-"), TEMPERATURES[dtype])
        if direction.startswith("stored-"):
            support = top_logits(teacher, SUPPORT, divergence.temperature, vocab, view.tp_group)
            stored = support.map(lambda x: x.transpose(0, 1))
            value = support_kl(student, stored, divergence, vocab, view.tp_group)
        else:
            value = distillation_kl(student, teacher, divergence, vocab, view.tp_group)
    (value * weights()).sum().backward()
    assert student.hidden.grad is not None
    assert student.weight.grad is not None
    return {
        "loss": value.detach(),
        "d_hidden": student.hidden.grad,
        "d_weight": student.weight.grad,
    }


def work(out: Path) -> None:
    for tp in TP_SIZES:
        view = groups.start(ParallelOptions(tensor_model_parallel_size=tp), seed=1)
        results = {
            f"{loss}-{vocab}-{dtype}.{name}": tensor.contiguous()
            for loss, vocab, dtype in itertools.product(LOSSES, VOCABULARIES, DTYPES)
            for name, tensor in one(loss, vocab, dtype, view).items()
        } | {
            f"{loss}-61-fp32.{name}": tensor.contiguous()
            for loss in (f"stored-{direction}" for direction in PLAIN)
            for name, tensor in one(loss, 61, "fp32", view).items()
        }
        save_file(results, out / f"tp{tp}-dp{view.dp_rank}-rank{view.tp_rank}.safetensors")
        groups.stop(keep_process_group=True)
    groups.stop()


PLAIN = {
    "teacher_student": losses.kl_teacher_student,
    "student_teacher": losses.kl_student_teacher,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocab")
    values_of_ranks(work, 4, out)
    return out


def shards(folder: Path, tp: int, case: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, parts of the gradients) of every rank of the first tensor-parallel group."""
    files = [load_file(folder / f"tp{tp}-dp0-rank{rank}.safetensors") for rank in range(tp)]
    names = ("loss", "d_hidden", "d_weight")
    return [tuple(file[f"{case}.{name}"] for name in names) for file in files]


def expected(loss: str, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """From the whole vocabulary in float64: loss per position and gradients."""
    states = hidden(0, dtype).double().requires_grad_()
    output = weight(0, vocab, dtype).double().requires_grad_()
    other = 0 if loss == "same" else 1
    logits = rounded(states @ output[:vocab].t(), dtype)
    teacher = hidden(other, dtype).double() @ weight(other, vocab, dtype).double().t()
    teacher = rounded(teacher[..., :vocab], dtype)
    if loss == "lm":
        target = labels(vocab).t().flatten()
        value = F.cross_entropy(logits.flatten(0, 1), target, reduction="none").view(5, 3)
    else:
        plain = PLAIN["teacher_student" if loss == "same" else loss]
        value = plain(logits, teacher, TEMPERATURES[dtype])
    (value * weights()).sum().backward()
    assert states.grad is not None
    assert output.grad is not None
    return value.detach(), states.grad, output.grad


def rounded(logits: Tensor, dtype: str) -> Tensor:
    """As stored by the output layer; the gradient passes through."""
    return logits + (logits.to(DTYPES[dtype]).double() - logits).detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_sharded_loss_and_gradients_equal_the_whole(
    folder: Path, tp: int, loss: str, vocab: int, dtype: str
) -> None:
    ranks = shards(folder, tp, f"{loss}-{vocab}-{dtype}")
    value, d_hidden, d_weight = expected(loss, vocab, dtype)
    for rank in ranks:
        assert rank[0].dtype == torch.float32
        assert torch.equal(rank[0], ranks[0][0])
        assert rank[1].dtype == rank[2].dtype == DTYPES[dtype]
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


@pytest.mark.parametrize("direction", PLAIN)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_sharded_loss_of_a_stored_teacher_equals_the_whole(
    folder: Path, tp: int, direction: str
) -> None:
    ranks = shards(folder, tp, f"stored-{direction}-61-fp32")
    states, output = hidden(0, "fp32").double(), weight(0, 61, "fp32").double()
    other = hidden(1, "fp32").double() @ weight(1, 61, "fp32")[:61].double().t()
    task = Divergence(direction, TEMPERATURES["fp32"])
    leaves = states.requires_grad_(), output.requires_grad_()
    value = merged_divergence(states @ output[:61].t(), other, other.topk(SUPPORT).indices, task)
    exact = torch.autograd.grad((value * weights()).sum(), leaves)
    d_hidden = torch.stack([rank[1].double() for rank in ranks]).sum(0)
    d_weight = torch.cat([rank[2].double() for rank in ranks])
    for rank in ranks:
        torch.testing.assert_close(rank[0].double(), value.detach(), rtol=0, atol=1e-5)
    for found, whole in zip((d_hidden, d_weight), exact, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_divergence_of_a_distribution_from_itself_is_exactly_zero(
    folder: Path, tp: int, dtype: str
) -> None:
    for vocab in VOCABULARIES:
        for parts in shards(folder, tp, f"same-{vocab}-{dtype}"):
            assert all((part == 0).all() for part in parts)


def test_data_parallel_groups_do_not_mix(folder: Path) -> None:
    first, second = (load_file(folder / f"tp2-dp{dp}-rank0.safetensors") for dp in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
