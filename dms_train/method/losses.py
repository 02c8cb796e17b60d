"""Losses on unsharded tensors; the parallel versions must equal them."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_teacher_student(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute KL(teacher || student) per position, in nats. Both [..., vocab]; returns [...].

    Both are softmax(logits / temperature). The factor temperature squared keeps the size of the
    gradient (Hinton, Vinyals and Dean, arXiv:1503.02531, section 2).
    """
    t = (teacher / temperature).log_softmax(-1)
    s = (student / temperature).log_softmax(-1)
    return (t.exp() * (t - s)).sum(-1) * temperature**2


def kl_student_teacher(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute KL(student || teacher) per position; otherwise as `kl_teacher_student`."""
    return kl_teacher_student(teacher, student, temperature)


def compression_hinge(
    alpha_sum: Tensor, decisions: int | Tensor, target: float | Tensor, form: str
) -> Tensor:
    """Compute the one-sided compression loss (paper section 3.2), averaged over samples.

    Args:
        alpha_sum: [b], sum of alpha over all layers, KV heads and positions.
        decisions: Number of terms in that sum, L * H * T; [b] where padding leaves samples with
            different T.
        target: alpha*, the share that must be evicted; a number or a tensor [].
        form: `mean` gives max(alpha* - mean alpha, 0), `sum` max(alpha* L H T - sum alpha, 0).

    Returns:
        Scalar.
    """
    short = torch.clamp(target - alpha_sum / decisions, min=0.0)
    return (short * decisions if form == "sum" else short).mean()
