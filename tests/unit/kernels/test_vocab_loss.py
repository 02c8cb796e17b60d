"""Both implementations of the vocabulary's losses are the formulas of `method.losses`, on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from dms_train.kernels.losses import vocabulary as vocab_loss
from dms_train.kernels.losses.vocabulary import Divergence
from tests.support import vocab_cases as support

INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture(
    params=[
        "vocabulary",
        pytest.param(
            "triton_vocabulary",
            marks=pytest.mark.skipif(
                not INTERPRETED, reason="needs triton and no GPU; with one see tests/gpu"
            ),
        ),
    ]
)
def kernels(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"dms_train.kernels.losses.{request.param}")


@pytest.mark.parametrize("task", support.DIVERGENCES, ids=str)
@pytest.mark.parametrize("problem", support.PROBLEMS, ids=str)
def test_divergence_and_gradient_equal_float64(kernels, problem, task) -> None:
    found = support.divergence(kernels, problem, task, "cpu")
    exact = support.exact_divergence(problem, task, "cpu")
    support.assert_near(found, exact, problem, task.temperature)


@pytest.mark.parametrize("task", support.DIVERGENCES[::2], ids=str)
@pytest.mark.parametrize("problem", support.STORED_PROBLEMS, ids=str)
def test_divergence_from_a_stored_teacher_equals_float64(kernels, problem, task) -> None:
    found = support.stored_divergence(kernels, problem, task, "cpu", 4)
    exact = support.exact_stored_divergence(problem, task, "cpu", 4)
    support.assert_near(found, exact, problem, task.temperature)


@pytest.mark.parametrize("problem", support.PROBLEMS, ids=str)
def test_likelihood_and_gradient_equal_float64(kernels, problem) -> None:
    found = support.nll(kernels, problem, "cpu")
    support.assert_near(found, support.exact_nll(problem, "cpu"), problem)


@pytest.mark.parametrize("task", support.DIVERGENCES, ids=str)
@pytest.mark.parametrize("problem", support.PROBLEMS, ids=str)
def test_equal_logits_give_exactly_nothing(kernels, problem, task, monkeypatch) -> None:
    logits = problem.logits(0, "cpu")
    monkeypatch.setattr(support.Rows, "logits", lambda *_: logits)
    loss, gradient = support.divergence(kernels, problem, task, "cpu")
    assert (loss == 0).all()
    assert (gradient == 0).all()


def test_a_constant_added_to_logits_changes_nothing(kernels) -> None:
    task, problem = Divergence("teacher_student"), support.Rows(4, 64, 64)
    p, q = problem.logits(0, "cpu").round(decimals=2), problem.logits(1, "cpu").round(decimals=2)
    shifted = (q.double() + 4096.0).float()
    with_offset, _ = vocab_loss.merge_divergence(
        kernels.divergence_statistics(p, shifted, 64, 1.0)[None]
    )
    exact = support.DIRECTIONS[task.direction](shifted.double(), p.double())
    torch.testing.assert_close(with_offset.double(), exact, rtol=1e-6, atol=1e-6)


def test_a_shard_of_padding_adds_nothing(kernels) -> None:
    problem = support.Rows(3, 61, 64)
    p, q = problem.logits(0, "cpu"), problem.logits(1, "cpu")
    own = kernels.divergence_statistics(p, q, 61, 1.0)
    empty = kernels.divergence_statistics(p, q, 0, 1.0)
    alone, with_padding = (
        vocab_loss.merge_divergence(torch.stack(parts))[0] for parts in ([own], [own, empty])
    )
    assert torch.equal(alone, with_padding)
