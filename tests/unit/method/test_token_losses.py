"""Losses by name: what each needs, and that an unknown name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dms_train.mcore.schedule import step_statistics
from dms_train.method.plan import StepPlan
from dms_train.method.token_losses import METRIC_NAMES, TOKEN_LOSSES, TokenLoss, token_loss
from tests.support import training_loop


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


@pytest.mark.parametrize("terms", [("kl", "alpha"), ("reads",), ("kl", "kl")])
def test_a_term_named_like_another_value_is_refused(terms: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"term '{terms[-1]}' of a token loss: another value is"):
        TokenLoss(needs_teacher=False, terms=terms, per_token=lambda losses, o: ())


def test_every_value_beside_the_terms_has_a_reserved_name(tmp_path: Path) -> None:
    fakes = training_loop.run(tmp_path, skips={2}, save_interval=1)
    logged = {name for _, values in fakes.of("log") for name in values}
    named = {name.partition("/")[2] for name in logged if name.startswith(("train/", "eval/"))}
    assert len(named) > 10
    statistics = step_statistics.StepStatistics(("kl",)).measured + step_statistics._COUNTED
    assert named | {*statistics} <= METRIC_NAMES | {"kl", "lm"}
