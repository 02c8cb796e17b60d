"""Rows of logits, ordinary and extreme, and their losses and gradients in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels.losses import vocabulary as vocab_loss
from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.method import losses
from tests.support.top_logits_cases import merged_divergence

DIRECTIONS = {
    "teacher_student": losses.kl_teacher_student,
    "student_teacher": losses.kl_student_teacher,
}
DIVERGENCES = [Divergence(name, t) for name in DIRECTIONS for t in (1.0, 0.5, 3.0)]


class Rows(NamedTuple):
    """A problem; columns from `columns` on are padding with enormous values.

    Attributes:
        kind: `normal`, `large` (logits in the hundreds), `minus_infinity` (the same third of the
            columns is -inf in both models) or `peaked` (one column holds nearly everything).
        splits: Shards of the vocabulary.
    """

    rows: int
    columns: int
    width: int
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    splits: int = 1

    def logits(self, seed: int, device: str) -> Tensor:
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(seed))
        x *= 100 if self.kind == "large" else 3
        if self.kind == "minus_infinity":
            x[:, 1::3] = -torch.inf
        if self.kind == "peaked":
            x[:, self.columns // 2] += 60
        x[:, self.columns :] = 1e4
        return x.to(self.dtype).to(device)

    def labels(self, device: str) -> Tensor:
        x = torch.arange(self.rows) * 3 % self.columns  # never a column that is -inf
        x[-1] = (self.columns - 1) // 3 * 3
        return x.to(device)

    def shards(self, *tensors: Tensor) -> list[tuple[int, tuple[Tensor, ...]]]:
        """(valid columns, the tensors' own columns, to be overwritten) of each shard."""
        each = self.width // self.splits
        return [
            (
                max(0, min(each, self.columns - each * i)),
                tuple(x[:, i * each : (i + 1) * each].clone() for x in tensors),
            )
            for i in range(self.splits)
        ]


PROBLEMS = [
    Rows(3, 61, 64),
    Rows(2, 5, 5, "peaked"),
    Rows(2, 4096, 4096),
    Rows(3, 9001, 9216, "large", splits=2),
    Rows(2, 5000, 8192, "minus_infinity", torch.bfloat16, splits=4),
    Rows(2, 4099, 4112, "peaked", torch.bfloat16),
]

STORED_PROBLEMS = [problem for problem in PROBLEMS if problem.kind in ("normal", "peaked")]


def divergence(kernels: Any, problem: Rows, task: Divergence, device: str) -> tuple[Tensor, Tensor]:
    """(loss [rows], gradient [rows, width]) of the functions in `kernels`."""
    student, teacher = problem.logits(0, device), problem.logits(1, device)
    shards = problem.shards(*task.ordered(student, teacher))
    statistics = [
        kernels.divergence_statistics(p, q, columns, task.temperature) for columns, (p, q) in shards
    ]
    kl, rows = vocab_loss.merge_divergence(torch.stack(statistics))
    for columns, (p, q) in shards:
        kernels.divergence_gradient_(p, q, columns, rows, task)
    gradient = [(q if task.student_is_q else p) for _, (p, q) in shards]
    return kl * task.temperature**2, torch.cat(gradient, -1)


def stored_divergence(
    kernels: Any, problem: Rows, task: Divergence, device: str, k: int
) -> tuple[Tensor, Tensor]:
    """The same from the teacher's k largest logits and the sum of the others."""
    student, teacher = problem.logits(0, device), problem.logits(1, device)
    ids = teacher[:, : problem.columns].topk(k).indices
    each = problem.width // problem.splits

    def merged(shards: list[tuple[int, tuple[Tensor, ...]]]) -> tuple[Tensor, Tensor]:
        tails, support = [], torch.zeros(k, problem.rows, device=device)
        for shard, (columns, (x,)) in enumerate(shards):
            support += vocab_loss.take_support_(x, ids - shard * each, columns).t()
            tails.append(kernels.divergence_statistics(x, x, columns, task.temperature)[:2])
        return vocab_loss.merge_support(torch.stack(tails), support / task.temperature)

    own = problem.shards(student)
    (log_q, total), (log_p, _) = merged(own), merged(problem.shards(teacher))
    kl, rows, gradient = vocab_loss.support_divergence(log_q, log_p, total, task)
    for shard, (columns, (x,)) in enumerate(own):
        kernels.divergence_gradient_(x, x, columns, rows, task)
        vocab_loss.add_at_(x, ids - shard * each, columns, gradient.t())
    return kl * task.temperature**2, torch.cat([x for _, (x,) in own], -1)


def exact_stored_divergence(
    problem: Rows, task: Divergence, device: str, k: int
) -> tuple[Tensor, Tensor]:
    """The same from plain torch in float64."""
    leaf = problem.logits(0, device)[:, : problem.columns].double().requires_grad_()
    # the order of equal logits is that of `stored_divergence`
    teacher = problem.logits(1, device)[:, : problem.columns]
    loss = merged_divergence(leaf, teacher.double(), teacher.topk(k).indices, task)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), F.pad(leaf.grad, (0, problem.width - problem.columns))


def exact_divergence(problem: Rows, task: Divergence, device: str) -> tuple[Tensor, Tensor]:
    """The same from `method.losses` in float64."""
    leaf = problem.logits(0, device)[:, : problem.columns].double().requires_grad_()
    teacher = problem.logits(1, device)[:, : problem.columns].double()
    # columns without probability in both contribute nothing, which float64 cannot represent
    possible = (leaf.detach()[0] > -torch.inf).nonzero()[:, 0]
    loss = DIRECTIONS[task.direction](leaf[:, possible], teacher[:, possible], task.temperature)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), F.pad(leaf.grad, (0, problem.width - problem.columns))


def nll(kernels: Any, problem: Rows, device: str) -> tuple[Tensor, Tensor]:
    """(loss [rows], gradient [rows, width]) of the functions in `kernels`."""
    logits, labels = problem.logits(0, device), problem.labels(device)
    shards = problem.shards(logits)
    statistics = [kernels.nll_statistics(x, columns) for columns, (x,) in shards]
    targets = logits.gather(1, labels[:, None])[:, 0].float()
    loss, rows = vocab_loss.merge_nll(torch.stack(statistics), targets)
    each = problem.width // problem.splits
    for shard, (columns, (x,)) in enumerate(shards):
        kernels.nll_gradient_(x, columns, rows, labels - shard * each)
    return loss, torch.cat([x for _, (x,) in shards], -1)


def exact_nll(problem: Rows, device: str) -> tuple[Tensor, Tensor]:
    """The same from torch's cross-entropy in float64."""
    leaf = problem.logits(0, device)[:, : problem.columns].double().requires_grad_()
    loss = F.cross_entropy(leaf, problem.labels(device), reduction="none")
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), F.pad(leaf.grad, (0, problem.width - problem.columns))


def assert_near(
    found: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    problem: Rows,
    temperature: float = 1.0,
) -> None:
    """Losses to float32; gradients to their own dtype; nothing in the padding.

    The reverse divergence's gradient is a probability times a difference of the loss's size.
    """
    unit = 2e-6 * max(1.0, temperature**2)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == problem.dtype
    torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-6, atol=unit)
    relative = 2**-7 if problem.dtype == torch.bfloat16 else 2e-5  # the interpreter truncates
    absolute = unit * (1 + exact[0].max().item())
    torch.testing.assert_close(found[1].double(), exact[1], rtol=relative, atol=absolute)
    assert (found[1][:, problem.columns :] == 0).all()
