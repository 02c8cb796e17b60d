"""Losses on unsharded tensors: what the parallel versions must equal."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_teacher_student(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) per position, in nats. Both [..., vocab]; returns [...]."""
    t = teacher.log_softmax(-1)
    return (t.exp() * (t - student.log_softmax(-1))).sum(-1)


def kl_student_teacher(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) per position, in nats. Both [..., vocab]; returns [...]."""
    return kl_teacher_student(teacher, student)


def compression_hinge(alpha_sum: Tensor, decisions: int, target: float, form: str) -> Tensor:
    """One-sided compression loss (paper section 3.2), per sample and then averaged.

    Args:
        alpha_sum: [b], sum of alpha over all layers, KV heads and positions.
        decisions: Number of terms in that sum, L * H * T.
        target: alpha*, the share that must be evicted.
        form: `mean` gives max(alpha* - mean alpha, 0), `sum` max(alpha* L H T - sum alpha, 0).

    Returns:
        Scalar.
    """
    short = torch.clamp(target - alpha_sum / decisions, min=0.0).mean()
    return short * decisions if form == "sum" else short
