"""The compiled kernels of the vocabulary's losses are the formulas, at any size."""

from __future__ import annotations

import pytest
import torch

from dms_train.kernels import dispatch
from dms_train.kernels.losses import vocabulary as vocab_loss
from dms_train.kernels.losses.vocabulary import Divergence
from tests.support import vocab_cases as support
from tests.support.vocab_cases import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROBLEMS = [
    *support.PROBLEMS,
    Rows(5, 151936, 151936, dtype=torch.bfloat16),
    Rows(5, 128256, 128256, "large", torch.bfloat16, splits=2),
    Rows(3, 151665, 151680, "minus_infinity", torch.bfloat16, splits=3),
    Rows(3, 50257, 50304, "peaked"),
]


@pytest.mark.parametrize("task", support.DIVERGENCES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_divergence_and_gradient_equal_float64(problem: Rows, task: Divergence) -> None:
    kernels = dispatch.vocabulary_losses(torch.device("cuda"))
    found = support.divergence(kernels, problem, task, "cuda")
    exact = support.exact_divergence(problem, task, "cuda")
    support.assert_near(found, exact, problem, task.temperature)


@pytest.mark.parametrize("task", support.DIVERGENCES, ids=str)
@pytest.mark.parametrize(
    "problem",
    [*support.STORED_PROBLEMS, Rows(5, 151936, 151936, dtype=torch.bfloat16, splits=2)],
    ids=str,
)
def test_divergence_from_a_stored_teacher_equals_float64(problem: Rows, task: Divergence) -> None:
    kernels, k = dispatch.vocabulary_losses(torch.device("cuda")), 4
    found = support.stored_divergence(kernels, problem, task, "cuda", k)
    exact = support.exact_stored_divergence(problem, task, "cuda", k)
    support.assert_near(found, exact, problem, task.temperature)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_likelihood_and_gradient_equal_float64(problem: Rows) -> None:
    kernels = dispatch.vocabulary_losses(torch.device("cuda"))
    found = support.nll(kernels, problem, "cuda")
    support.assert_near(found, support.exact_nll(problem, "cuda"), problem)


@pytest.mark.parametrize("task", support.DIVERGENCES, ids=str)
def test_equal_logits_give_exactly_nothing(
    task: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Rows(7, 151936, 151936, dtype=torch.bfloat16)
    logits = problem.logits(0, "cuda")
    monkeypatch.setattr(Rows, "logits", lambda *_: logits)
    kernels = dispatch.vocabulary_losses(torch.device("cuda"))
    loss, gradient = support.divergence(kernels, problem, task, "cuda")
    assert (loss == 0).all()
    assert (gradient == 0).all()


def test_offsets_beyond_two_to_the_31() -> None:
    rows, width = 2**15 + 64, 2**16
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1, :8] = torch.arange(8.0)
    expected = x[-1:].clone()
    kernels = dispatch.vocabulary_losses(x.device)
    labels = torch.full((rows,), 3, device="cuda")
    statistics = kernels.nll_statistics(x, width)
    loss, constants = vocab_loss.merge_nll(statistics[None], x[:, 3].float())
    kernels.nll_gradient_(x, width, constants, labels)
    whole = torch.nn.functional.cross_entropy(expected.double(), labels[:1])
    torch.testing.assert_close(loss[-1].double(), whole)
    vocab_loss.nll_gradient_(expected, width, constants[:, -1:], labels[:1])
    torch.testing.assert_close(x[-1], expected[0], rtol=2**-7, atol=1e-6)
