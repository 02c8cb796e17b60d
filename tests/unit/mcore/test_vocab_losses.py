"""With one shard the sharded losses are those of `method.losses`, padding or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.mcore import vocab_losses
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.vocab_losses import distillation_kl, next_token_loss, valid_columns
from dms_train.method import losses

VOCAB, WIDTH = 61, 64
DIRECTIONS = {
    "teacher_student": losses.kl_teacher_student,
    "student_teacher": losses.kl_student_teacher,
}


def logits(seed: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """[s=7, b=3, width] with enormous values in the padding."""
    x = 3 * torch.randn(7, 3, width, generator=torch.Generator().manual_seed(seed))
    x[..., VOCAB:] = 1e4
    return x.to(dtype)


def weights() -> Tensor:
    return torch.rand(7, 3, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("width", [VOCAB, WIDTH])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_divergence_and_gradient_equal_the_plain_loss(
    view: ParallelView, direction: str, width: int
) -> None:
    student, teacher = logits(0, width).requires_grad_(), logits(1, width)
    kl = distillation_kl(student, teacher, direction, VOCAB, view.tp_group)
    plain = student.detach()[..., :VOCAB].double().requires_grad_()
    expected = DIRECTIONS[direction](plain, teacher[..., :VOCAB].double())
    torch.testing.assert_close(kl.double(), expected, rtol=2e-6, atol=2e-6)
    (kl * weights()).sum().backward()
    (expected * weights()).sum().backward()
    torch.testing.assert_close(student.grad[..., :VOCAB].double(), plain.grad, rtol=1e-5, atol=1e-5)
    assert (student.grad[..., VOCAB:] == 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_divergence_of_equal_logits_is_zero_with_zero_gradient(
    view: ParallelView, direction: str
) -> None:
    student = logits(0).requires_grad_()
    kl = distillation_kl(student, student.detach() + 5.0, direction, VOCAB, view.tp_group)
    assert kl.abs().max() < 1e-5
    kl.sum().backward()
    assert student.grad.abs().max() < 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_positions_may_be_taken_in_any_number_of_chunks(
    view: ParallelView, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chunk in (1, 3, 7, 512):
        monkeypatch.setattr(vocab_losses, "_CHUNK", chunk)
        student = logits(0).requires_grad_()
        kl = distillation_kl(student, logits(1), direction, VOCAB, view.tp_group)
        (kl * weights()).sum().backward()
        results.append((kl.detach(), student.grad))
    for kl, gradient in results[1:]:
        torch.testing.assert_close(kl, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sixteen_bit_logits_are_judged_in_float32(view: ParallelView, direction: str) -> None:
    student = logits(0, dtype=torch.bfloat16).requires_grad_()
    teacher = logits(1, dtype=torch.bfloat16)
    kl = distillation_kl(student, teacher, direction, VOCAB, view.tp_group)
    assert kl.dtype == torch.float32
    expected = DIRECTIONS[direction](
        student.detach()[..., :VOCAB].double(), teacher[..., :VOCAB].double()
    )
    torch.testing.assert_close(kl.double(), expected, rtol=2e-6, atol=2e-6)
    kl.sum().backward()
    assert student.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("width", [VOCAB, WIDTH])
def test_cross_entropy_and_gradient_equal_torchs(view: ParallelView, width: int) -> None:
    x = logits(0, width).requires_grad_()
    labels = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(4))
    loss = next_token_loss(x, labels, VOCAB, view.tp_group)
    plain = x.detach()[..., :VOCAB].clone().requires_grad_()
    expected = F.cross_entropy(plain.flatten(0, 1), labels.t().flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected, rtol=1e-5, atol=1e-6)
    (loss * weights()).sum().backward()
    (expected.view(7, 3) * weights()).sum().backward()
    torch.testing.assert_close(x.grad[..., :VOCAB], plain.grad, rtol=1e-5, atol=1e-6)
    assert (x.grad[..., VOCAB:] == 0).all()


@pytest.mark.parametrize(("shard", "columns"), [(0, 32), (1, 29), (2, 0), (3, 0)])
def test_padding_is_at_the_end_and_may_fill_whole_shards(shard: int, columns: int) -> None:
    assert valid_columns(32, VOCAB, shard) == columns
