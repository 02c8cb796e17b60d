"""Token losses of the stages, by the name that `stage.NAME.loss` gives.

A new loss is one entry of `TOKEN_LOSSES`, and one field of `LossOptions` for each parameter. It is
written in terms of `VocabularyLosses`, which the vocabulary-parallel output layer implements. This
file therefore needs no torch, and the plan of a run can use it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from dms_train.limits import OneOf, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Parameters of the token losses. No trained model depends on them, so no export stores them.

    Attributes:
        kl_direction: `teacher_student` is KL(teacher || student), `student_teacher` the reverse.
        kl_temperature: Divides both models' logits in the KL. Its square multiplies the KL, which
            keeps the size of the gradient (arXiv:1503.02531, section 2).
    """

    kl_direction: Annotated[str, OneOf("teacher_student", "student_teacher")] = "teacher_student"
    kl_temperature: Annotated[float, Positive()] = 1.0


PLAIN_LOSS = LossOptions()
# Other values of a step, which are recorded beside the terms of its loss.
METRIC_NAMES = frozenset(
    {
        *("loss", "aux_loss", "alpha", "target_cr", "cr", "channel_scale"),
        *("grad_norm", "lr", "skipped_steps", "kv_reads", "kept", "kept_layers"),
        *("live", "reads", "samples", "positions", "tokens_per_second", "tflops_per_device", "mfu"),
        *("memory_bytes", "memory_gib", "checkpoint_seconds", "failed_checkpoints"),
    }
)


class VocabularyLosses(Protocol):
    """Losses of the positions of a micro-batch. Each is float32 [s, b], in nats."""

    def divergence(self, direction: str, temperature: float) -> Any:
        """Compute the KL divergence between student and teacher, times temperature squared.

        Args:
            direction: `teacher_student` for KL(teacher || student), or `student_teacher`.
            temperature: Both models' logits are divided by it.
        """
        ...

    def cross_entropy(self) -> Any:
        """Compute the cross-entropy of the student and the next token."""
        ...

    def teacher_cross_entropy(self) -> Any:
        """Compute the cross-entropy of the teacher and the next token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One kind of loss: the sum of one or more named terms.

    Attributes:
        needs_teacher: Whether it compares the student with the frozen original.
        terms: Names of the terms, different from each other and from `METRIC_NAMES`. The mean of
            each over the loss positions is logged under its name.
        per_token: Compute the terms [s, b], one for each name.

    Raises:
        ValueError: A term has the name of another value.
    """

    needs_teacher: bool
    terms: tuple[str, ...]
    per_token: Callable[[VocabularyLosses, LossOptions], tuple[Any, ...]]

    def __post_init__(self) -> None:
        for index, name in enumerate(self.terms):
            if name in METRIC_NAMES or name in self.terms[:index]:
                raise ValueError(
                    f"term {name!r} of a token loss: another value is logged under this name; "
                    "give the term another name"
                )


TOKEN_LOSSES = {
    "distill": TokenLoss(
        needs_teacher=True,
        terms=("kl",),
        per_token=lambda losses, o: (losses.divergence(o.kl_direction, o.kl_temperature),),
    ),
    "lm": TokenLoss(
        needs_teacher=False,
        terms=("lm",),
        per_token=lambda losses, o: (losses.cross_entropy(),),
    ),
}

TEACHER_LM = "teacher_lm"
"""Name of the teacher's own loss. It measures the teacher, and no stage trains with it."""
_TEACHER_LOSS = TokenLoss(
    needs_teacher=True,
    terms=(TEACHER_LM,),
    per_token=lambda losses, o: (losses.teacher_cross_entropy(),),
)


def token_loss(name: str) -> TokenLoss:
    """Return the loss of that name.

    Raises:
        ValueError: No loss has that name; the message lists the known ones.
    """
    if name == TEACHER_LM:
        return _TEACHER_LOSS
    if not isinstance(name, str) or name not in TOKEN_LOSSES:
        raise ValueError(f"loss={name}: choose one of {', '.join(TOKEN_LOSSES)}")
    return TOKEN_LOSSES[name]
