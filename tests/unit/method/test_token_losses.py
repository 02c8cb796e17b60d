"""Losses by name: what each needs, and that an unknown name is refused."""

from __future__ import annotations

import pytest

from dms_train.method.plan import StepPlan
from dms_train.method.token_losses import TOKEN_LOSSES, token_loss


def test_only_distillation_needs_a_teacher() -> None:
    assert {name for name, loss in TOKEN_LOSSES.items() if loss.needs_teacher} == {"distill"}
    assert {name: loss.terms for name, loss in TOKEN_LOSSES.items()} == {
        "distill": ("kl",),
        "lm": ("lm",),
    }


@pytest.mark.parametrize("ask", [token_loss, lambda name: StepPlan(loss=name)])
def test_an_unknown_loss_is_refused_with_the_known_ones(ask) -> None:
    with pytest.raises(ValueError, match="loss=kl: choose one of distill, lm"):
        ask("kl")
