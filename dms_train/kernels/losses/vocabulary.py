"""Losses over a vocabulary, row by row, in torch operations; `triton_vocabulary` fuses them.

Logits are [rows, width], one row per position. A rank holds a shard of the vocabulary; the first
`columns` columns count and the others are padding. A loss takes three steps. The first computes
statistics of the rank's own columns. The second merges the statistics of all ranks. The third
writes the gradient over the logits. A logit may be -inf in both models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST = torch.finfo(torch.float32).min  # maximum over zero columns; -inf would give nan


class Divergence(NamedTuple):
    """KL(p || q) of softmax(logits / temperature), times temperature squared.

    The factor makes the size of the gradient independent of the temperature (Hinton, Vinyals and
    Dean, arXiv:1503.02531, section 2).

    Attributes:
        direction: `teacher_student` is KL(teacher || student), `student_teacher` the reverse.
        temperature: Above 0.
    """

    direction: str
    temperature: float = 1.0

    @property
    def student_is_q(self) -> bool:
        """True if q is the student."""
        return self.direction == "teacher_student"

    def ordered(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return (p, q)."""
        return (teacher, student) if self.student_is_q else (student, teacher)


def _scaled(logits: Tensor, columns: int, temperature: float) -> Tensor:
    """Return the logits that count, in float32, over the temperature; may be a view of them."""
    valid = logits[:, :columns].float()
    return valid if temperature == 1 else valid / temperature


def _shifted(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum [rows], a new tensor of logits minus maximum [rows, columns])."""
    if scaled.shape[1] == 0:
        return scaled.new_full(scaled.shape[:1], _LOWEST), scaled.clone()
    top = scaled.amax(-1).clamp_(min=_LOWEST)
    return top, _finite(scaled - top[:, None])


def _finite(x: Tensor) -> Tensor:
    """Replace -inf in place by a finite number with exponential 0, so that 0 * x is 0."""
    return x.clamp_(min=_LOWEST)


def divergence_statistics(p: Tensor, q: Tensor, columns: int, temperature: float) -> Tensor:
    """Return statistics of the first `columns` columns of logits p and q, float32 [5, rows].

    With x~ = x / temperature - its maximum: maximum and sum of exp(p~), the same of q, and the sum
    of exp(p~) (p~ - q~).
    """
    top_p, p = _shifted(_scaled(p, columns, temperature))
    top_q, q = _shifted(_scaled(q, columns, temperature))
    exp_p = p.exp()
    dots = p.sub_(q).mul_(exp_p).sum(-1)
    return torch.stack([top_p, exp_p.sum(-1), top_q, q.exp_().sum(-1), dots])


def merge_divergence(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the statistics [ranks, 5, rows] of all ranks.

    Returns:
        KL [rows] in nats, without the factor of the temperature; and the inputs of the gradient,
        [5, rows]. The latter are maximum and logarithm of the sum for p, the same for q, and KL.
    """
    tops_p, sums_p, tops_q, sums_q, dots = statistics.unbind(1)
    top_p, log_p, share_p = _merged(tops_p, sums_p)
    top_q, log_q, _ = _merged(tops_q, sums_q)
    # each rank's p~ - q~ was relative to its own maxima
    moved = (tops_p - top_p) - (tops_q - top_q)
    dot = (share_p * (dots + sums_p * moved)).sum(0)
    kl = dot / log_p.exp() - (log_p - log_q)
    return kl, torch.stack([top_p, log_p, top_q, log_q, kl])


def _merged(tops: Tensor, exp_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (maximum, log of the sum relative to it, factor on each rank's sum)."""
    top = tops.amax(0)
    share = (tops - top).exp()
    return top, (share * exp_sums).sum(0).log(), share


def divergence_gradient_(
    p: Tensor, q: Tensor, columns: int, rows: Tensor, divergence: Divergence
) -> None:
    """Write the gradient of KL times temperature squared over the student's logits.

    Args:
        p: Logits [rows, width]; overwritten if the student is p.
        q: Logits [rows, width]; overwritten if the student is q.
        columns: Columns that count; the gradient of the others is 0.
        rows: Second result of `merge_divergence`.
        divergence: Direction and temperature.
    """
    t = divergence.temperature
    top_p, log_p, top_q, log_q, kl = rows[..., None]
    p_valid = _finite(_scaled(p, columns, t) - top_p).sub_(log_p)
    q_valid = _finite(_scaled(q, columns, t) - top_q).sub_(log_q)
    if divergence.student_is_q:
        student, gradient = q, q_valid.exp_().sub_(p_valid.exp_())
    else:
        student, gradient = p, q_valid.neg_().add_(p_valid).sub_(kl).mul_(p_valid.exp_())
    student[:, :columns] = gradient.mul_(t)
    student[:, columns:] = 0


def nll_statistics(logits: Tensor, columns: int) -> Tensor:
    """Return maximum and sum of exp(x - maximum) of the first columns, float32 [2, rows]."""
    top, shifted = _shifted(_scaled(logits, columns, 1.0))
    return torch.stack([top, shifted.exp_().sum(-1)])


def merge_nll(statistics: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the statistics [ranks, 2, rows] of all ranks, with the labels' logits [rows].

    Returns:
        Negative log likelihood [rows] in nats; and the inputs of the gradient, [2, rows].
    """
    top, log_sum, _ = _merged(*statistics.unbind(1))
    return log_sum - (targets - top), torch.stack([top, log_sum])


def nll_gradient_(logits: Tensor, columns: int, rows: Tensor, labels: Tensor) -> None:
    """Write softmax minus one-hot over the logits.

    Args:
        logits: [rows, width]; overwritten.
        columns: Columns that count; the gradient of the others is 0.
        rows: Second result of `merge_nll`.
        labels: int64 [rows], columns of this shard; any other value belongs to another rank.
    """
    top, log_sum = rows[..., None]
    logits[:, columns:] = 0
    if columns > 0:
        gradient = (_scaled(logits, columns, 1.0) - top).sub_(log_sum).exp_()
        here = (labels >= 0) & (labels < columns)
        gradient.scatter_add_(1, torch.where(here, labels, 0)[:, None], -here[:, None].float())
        logits[:, :columns] = gradient


def take_support_(logits: Tensor, ids: Tensor, columns: int) -> Tensor:
    """Take tokens out of a shard of the logits: return their logits, and write -inf there.

    Args:
        logits: [rows, width]; the tokens' logits are overwritten.
        ids: int64 [rows, k], columns of this shard; any other value belongs to another rank.
        columns: Columns that count.

    Returns:
        float32 [rows, k], 0 where a token belongs to another rank.
    """
    here = (ids >= 0) & (ids < columns)
    values = logits.gather(1, torch.where(here, ids, 0))
    add_at_(logits, ids, columns, here.new_full(here.shape, -torch.inf, dtype=logits.dtype))
    return torch.where(here, values, 0).float()


def add_at_(logits: Tensor, ids: Tensor, columns: int, values: Tensor) -> None:
    """Add values [rows, k] to the columns `ids` of this shard, as `take_support_` reads them."""
    here = (ids >= 0) & (ids < columns)
    added = torch.where(here, values, 0).to(logits.dtype)
    logits.scatter_add_(1, torch.where(here, ids, 0), added)


def merge_support(tails: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distribution in which all tokens outside a support are one outcome.

    Args:
        tails: [ranks, 2, rows], maximum and sum of exp(x - maximum) of the other tokens of a rank.
        support: [k, rows], logits of the support over the temperature.

    Returns:
        Log-probabilities of the support and of the other tokens, [k + 1, rows]; and the logarithm
        of the sum of exp(x) of all tokens, [rows].
    """
    top, log_sum, _ = _merged(*tails.unbind(1))
    outcomes = torch.cat([support, (top + log_sum)[None]])
    total = outcomes.logsumexp(0)
    return outcomes - total, total


def support_divergence(
    student: Tensor, teacher: Tensor, total: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the KL of two results of `merge_support`, and the inputs of its gradient.

    Args:
        student: Log-probabilities [k + 1, rows].
        teacher: The same tokens, [k + 1, rows].
        total: Second result of `merge_support` for the student, [rows].
        divergence: Direction and temperature.

    Returns:
        KL [rows] in nats, without the factor of the temperature. Then the inputs [5, rows] with
        which `divergence_gradient_` computes the gradient of the tokens outside the support, if p
        and q are both the student's logits. Then the gradient of the support, [k, rows].
    """
    p, q = divergence.ordered(student, teacher)
    ratio = torch.where(p > -torch.inf, p - q, 0.0)
    kl = (p.exp() * ratio).sum(0)
    gradient = q.exp() - p.exp() if divergence.student_is_q else p.exp() * (ratio - kl)
    # outside the support the teacher's distribution has the shape of the student's
    lower = (student[-1] - teacher[-1]).nan_to_num(nan=0.0)
    zero = torch.zeros_like(total)
    shifted = divergence.ordered(total, total + lower)
    rows = torch.stack([zero, shifted[0], zero, shifted[1], kl])
    return kl, rows, gradient[:-1] * divergence.temperature
