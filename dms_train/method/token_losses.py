"""The losses that a stage can train with, by the name that `stage.NAME.loss` gives.

A new loss is one entry of `TOKEN_LOSSES`. It is written in the terms that `VocabularyLosses` offers
behind the vocabulary-parallel output layer, so that this file needs no torch and the plan of a run
can use it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dms_train.method.base import MethodSpec


class VocabularyLosses(Protocol):
    """Losses of the positions of a microbatch. Each is float32 [s, b], in nats."""

    def divergence(self, direction: str, temperature: float) -> Any:
        """KL divergence between student and teacher, times temperature squared.

        Args:
            direction: `teacher_student` for KL(teacher || student), or `student_teacher`.
            temperature: Both models' logits are divided by it.
        """
        ...

    def cross_entropy(self) -> Any:
        """Of the student and the next token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One kind of loss.

    Attributes:
        needs_teacher: Whether the frozen original runs beside the student.
        metric: Name of its mean over the loss positions in metrics.
        per_token: Loss [s, b] from what is offered and the constants of the method.
    """

    needs_teacher: bool
    metric: str
    per_token: Callable[[VocabularyLosses, MethodSpec], Any]


TOKEN_LOSSES = {
    "distill": TokenLoss(
        needs_teacher=True,
        metric="kl",
        per_token=lambda losses, spec: losses.divergence(spec.kl_direction, spec.kl_temperature),
    ),
    "lm": TokenLoss(
        needs_teacher=False,
        metric="lm",
        per_token=lambda losses, spec: losses.cross_entropy(),
    ),
}


def token_loss(name: str) -> TokenLoss:
    """The loss of that name.

    Raises:
        ValueError: There is none; the known ones are named.
    """
    if not isinstance(name, str) or name not in TOKEN_LOSSES:
        raise ValueError(f"loss={name}: choose one of {', '.join(TOKEN_LOSSES)}")
    return TOKEN_LOSSES[name]
