"""On one rank output layer and loss together are the plain formulas, in any chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import vocabulary_losses as vocab_losses
from dms_train.mcore.layers.vocabulary_losses import (
    Projection,
    distillation_kl,
    next_token_loss,
    support_kl,
    top_logits,
    valid_columns,
)
from dms_train.method.top_logits import TopLogits
from tests.support.top_logits_cases import merged, merged_divergence
from tests.support.vocab_cases import DIRECTIONS, DIVERGENCES

VOCAB, WIDTH, HIDDEN = 61, 64, 8
Loss = Callable[[Projection], Tensor]


def projection(seed: int, dtype: torch.dtype = torch.float32) -> Projection:
    """Return a projection of 7 positions of 3 samples; padding rows hold enormous values."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(7, 3, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator)
    weight[VOCAB:] = 1e4
    return Projection(hidden.requires_grad_(), weight.to(dtype).requires_grad_())


def d_losses() -> Tensor:
    return torch.rand(7, 3, generator=torch.Generator().manual_seed(9))


def labels() -> Tensor:
    return torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(4))


def outcome(loss: Loss, student: Projection) -> tuple[Tensor, ...]:
    """(loss, gradients of hidden states and weight)."""
    value = loss(student)
    return (value.detach(), *torch.autograd.grad(value, student[:2], d_losses().to(value.dtype)))


def kl(view: ParallelView, task: Divergence, dtype: torch.dtype = torch.float32) -> Loss:
    teacher = projection(1, dtype)
    return lambda student: distillation_kl(student, teacher, task, VOCAB, view.tp_group)


def lm(view: ParallelView) -> Loss:
    return lambda student: next_token_loss(student, labels(), VOCAB, view.tp_group)


def exact_kl(task: Divergence) -> Loss:
    teacher = projection(1)

    def loss(student: Projection) -> Tensor:
        s, t = (x.hidden @ x.weight[:VOCAB].t() for x in (student, teacher))
        return DIRECTIONS[task.direction](s.double(), t.detach().double(), task.temperature)

    return loss


def exact_lm(student: Projection) -> Tensor:
    logits = (student.hidden @ student.weight[:VOCAB].t()).double()
    target = labels().t().flatten()
    return F.cross_entropy(logits.flatten(0, 1), target, reduction="none").view(7, 3)


def assert_close(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", DIVERGENCES, ids=str)
def test_divergence_and_gradients_equal_the_plain_loss(
    view: ParallelView, task: Divergence
) -> None:
    found = outcome(kl(view, task), projection(0))
    assert_close(found, outcome(exact_kl(task), projection(0)))
    assert (found[2][VOCAB:] == 0).all()


def test_cross_entropy_and_gradients_equal_torchs(view: ParallelView) -> None:
    found = outcome(lm(view), projection(0))
    assert_close(found, outcome(exact_lm, projection(0)))
    assert (found[2][VOCAB:] == 0).all()


def stored_kl(view: ParallelView, task: Divergence, k: int) -> Loss:
    """The divergence from what is stored of the teacher of `kl`."""
    frozen = [x.detach() for x in projection(1)[:2]]
    stored = top_logits(Projection(*frozen), k, task.temperature, VOCAB, view.tp_group)
    stored = stored.map(lambda x: x.transpose(0, 1))
    return lambda student: support_kl(student, stored, task, VOCAB, view.tp_group)


@pytest.mark.parametrize("task", DIVERGENCES, ids=str)
@pytest.mark.parametrize("k", [1, 9])
def test_divergence_from_a_stored_teacher_merges_the_tokens_that_it_leaves_out(
    view: ParallelView, task: Divergence, k: int
) -> None:
    def exact(student: Projection) -> Tensor:
        s, t = (x.hidden @ x.weight[:VOCAB].t() for x in (student, projection(1)))
        return merged_divergence(s.double(), t.detach().double(), t.topk(k).indices, task)

    found = outcome(stored_kl(view, task, k), projection(0))
    assert_close(found, outcome(exact, projection(0)))
    assert (found[2][VOCAB:] == 0).all()


@pytest.mark.parametrize("task", DIVERGENCES, ids=str)
def test_a_teacher_stored_whole_is_the_teacher(view: ParallelView, task: Divergence) -> None:
    found = outcome(stored_kl(view, task, VOCAB), projection(0))
    assert_close(found, outcome(exact_kl(task), projection(0)))


def test_stored_probabilities_are_the_largest_and_the_mass_of_the_others(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_losses, "_CHUNK", {"cpu": 4 * WIDTH})
    model = Projection(*(x.detach() for x in projection(1)[:2]))
    stored = top_logits(model, 5, 2.0, VOCAB, view.tp_group)
    logits = (model.hidden @ model.weight[:VOCAB].t()).double()
    assert torch.equal(stored.ids.long(), logits.topk(5).indices)
    exact = merged(logits, logits.topk(5).indices, 2.0)
    found = torch.cat([stored.log_probs, stored.log_tails[..., None]], -1)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


def test_rounding_of_a_stored_teacher_adds_no_divergence_from_itself(view: ParallelView) -> None:
    model = Projection(*(x.detach() for x in projection(1)[:2]))
    log_probs, ids, log_tails = top_logits(model, 9, 1.0, VOCAB, view.tp_group)
    stored = TopLogits(log_probs.half(), ids, log_tails).map(lambda x: x.transpose(0, 1))
    task = Divergence("teacher_student")
    assert support_kl(model, stored, task, VOCAB, view.tp_group).abs().max() < 1e-6


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_divergence_of_a_model_from_itself_is_exactly_zero(
    view: ParallelView, direction: str, dtype: torch.dtype
) -> None:
    loss = kl(view, Divergence(direction), dtype)
    assert all((x == 0).all() for x in outcome(loss, projection(1, dtype)))


@pytest.mark.parametrize("name", ["kl", "lm"])
def test_positions_may_be_taken_in_any_number_of_chunks(
    view: ParallelView, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = lm(view) if name == "lm" else kl(view, Divergence("teacher_student"))
    results = []
    for positions in (1, 3, 20, 21, 512):
        monkeypatch.setattr(vocab_losses, "_CHUNK", {"cpu": positions * WIDTH})
        results.append(outcome(loss, projection(0)))
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_losses_of_sixteen_bit_logits_are_computed_in_float32(
    view: ParallelView, direction: str
) -> None:
    student, teacher = projection(0, torch.bfloat16), projection(1, torch.bfloat16)
    found = outcome(kl(view, Divergence(direction), torch.bfloat16), student)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == found[2].dtype == torch.bfloat16
    logits = [(x.hidden @ x.weight.t())[..., :VOCAB].detach().double() for x in (student, teacher)]
    exact = DIRECTIONS[direction](*logits)
    torch.testing.assert_close(found[0].double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(view: ParallelView, frozen: int) -> None:
    student = projection(0)
    student[frozen].requires_grad_(False)
    lm(view)(student).sum().backward()
    assert student[frozen].grad is None
    assert student[1 - frozen].grad is not None


def sizes_of(call: Callable[[], Any]) -> list[int]:
    """Elements of every tensor that an operation gives while `call` runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[int] = []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                x.numel()
                for x in (out if isinstance(out, tuple) else [out])
                if isinstance(x, Tensor)
            )
            return out

    with RecordSizes():
        call()
    return seen


@pytest.mark.parametrize("name", ["kl", "lm"])
def test_without_gradients_whole_logits_never_exist(
    view: ParallelView, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_losses, "_CHUNK", {"cpu": 4 * WIDTH})
    loss = lm(view) if name == "lm" else kl(view, Divergence("teacher_student"))
    student = projection(0)
    with torch.no_grad():
        assert max(sizes_of(lambda: loss(student))) < 21 * WIDTH
    assert max(sizes_of(lambda: loss(student))) == 21 * WIDTH


def test_one_tensor_of_logits_is_kept_for_the_backward_pass(view: ParallelView) -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    student = projection(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kl(view, Divergence("teacher_student"))(student)
    assert sorted(x.numel() for x in kept) == sorted([21 * WIDTH, 21 * HIDDEN, WIDTH * HIDDEN])


@pytest.mark.parametrize(("shard", "columns"), [(0, 32), (1, 29), (2, 0), (3, 0)])
def test_padding_is_at_the_end_and_may_fill_whole_shards(shard: int, columns: int) -> None:
    assert valid_columns(32, VOCAB, shard) == columns
