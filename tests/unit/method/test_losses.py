"""The two terms of the objective on numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dms_train.method import losses

P, Q = [0.5, 0.5], [0.25, 0.75]
KL_PQ = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # 0.1438
KL_QP = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # 0.1308


def logits(probabilities: list[float], offset: float = 3.0) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log() + offset


def test_divergence_directions_have_the_right_names() -> None:
    student, teacher = logits(Q), logits(P)
    assert losses.kl_teacher_student(student, teacher).item() == pytest.approx(KL_PQ)
    assert losses.kl_student_teacher(student, teacher).item() == pytest.approx(KL_QP)


@pytest.mark.parametrize("kl", [losses.kl_teacher_student, losses.kl_student_teacher])
def test_divergence_of_equal_distributions_is_zero_whatever_their_offset(kl) -> None:
    a = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert kl(a, a + 11.0).abs().max() < 1e-12


def test_student_gradient_of_the_forward_divergence_is_student_less_teacher() -> None:
    student = logits(Q).requires_grad_()
    losses.kl_teacher_student(student, logits(P)).sum().backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-0.25, 0.25]], dtype=torch.float64))


@pytest.mark.parametrize(("form", "expected"), [("mean", 0.15), ("sum", 1.5)])
def test_hinge_is_taken_per_sample_and_then_averaged(form: str, expected: float) -> None:
    alpha_sum = torch.tensor([2.0, 6.0])  # of 10 decisions: 0.2 is short of 0.5, 0.6 is not
    assert losses.compression_hinge(alpha_sum, 10, 0.5, form).item() == pytest.approx(expected)


def test_hinge_pulls_only_samples_that_are_short() -> None:
    alpha_sum = torch.tensor([2.0, 6.0], requires_grad=True)
    losses.compression_hinge(alpha_sum, 10, 0.5, "sum").backward()
    torch.testing.assert_close(alpha_sum.grad, torch.tensor([-0.5, 0.0]))


def test_a_target_of_nothing_costs_nothing() -> None:
    assert losses.compression_hinge(torch.zeros(3), 10, 0.0, "mean").item() == 0.0
