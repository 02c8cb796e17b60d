"""Per-token losses after a vocabulary-parallel output layer; `method.losses` is the reference.

The output layer and the loss are one differentiable function of the hidden states. It takes
positions chunk by chunk. For each chunk it computes the logits and their statistics, and exchanges
a few numbers per position over the tensor-parallel group. It then writes the loss's gradient over
the student's logits in their own dtype. The teacher's logits exist for one chunk only, and without
gradients the student's too. The incoming gradient, one number per position, multiplies rows of the
hidden size instead of rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels import dispatch
from dms_train.kernels.losses import vocabulary as vocab_loss
from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.mcore import compat
from dms_train.mcore.errors import ModelError
from dms_train.mcore.options import LOGITS_CHUNK
from dms_train.method.top_logits import TopLogits

# Number of one model's logits that exist at a time. The logits that become the student's gradient
# exist besides. A GPU needs many for efficient matrix products, a CPU few enough for its cache.
_CHUNK = {"cuda": LOGITS_CHUNK, "cpu": 2**22}
_TILE = 128  # positions


class Projection(NamedTuple):
    """Factors of the logits.

    Attributes:
        hidden: [s, b, h], all positions, the same on every rank of the tensor-parallel group. Its
            gradient is this rank's part of a sum over the group.
        weight: [padded vocabulary / tp, h].
        accumulates: Whether the gradient of `weight` is added to its fp32 `main_grad`
            (megatron's `gradient_accumulation_fusion`) rather than given to autograd.
    """

    hidden: Tensor
    weight: Tensor
    accumulates: bool = False


# (positions, their logits, whether to replace the logits by the gradient) -> losses
_RowLoss = Callable[[slice, Tensor, bool], Tensor]


def valid_columns(width: int, vocab_size: int, shard: int) -> int:
    """Count the columns of a vocabulary shard that are no padding."""
    return max(0, min(width, vocab_size - width * shard))


def _chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Divide rows into chunks of nearly equal size, in whole tiles of a GPU's matrix products."""
    count = -(-rows * width // _CHUNK[device.type])
    size = -(-rows // max(count, 1))
    if size > _TILE:
        size = -(-size // _TILE) * _TILE
    return [slice(first, min(first + size, rows)) for first in range(0, rows, max(size, 1))]


class _LinearLoss(torch.autograd.Function):
    """Loss [rows] of hidden [rows, h] and weight [width, h]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, row_loss: _RowLoss, keeps: bool, accumulates: bool
    ) -> Tensor:
        rows, width = hidden.shape[0], weight.shape[0]
        losses = hidden.new_empty(rows, dtype=torch.float32)
        gradient = hidden.new_empty(rows, width) if keeps else None
        for c in _chunks(rows, width, hidden.device):
            logits = torch.mm(hidden[c], weight.t(), out=None if gradient is None else gradient[c])
            losses[c] = row_loss(c, logits, keeps)
        ctx.accumulates = accumulates
        if gradient is not None:
            ctx.save_for_backward(hidden, weight, gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, gradient = ctx.saved_tensors
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_hidden = (gradient @ weight * d_losses[:, None]).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            inputs = (hidden * d_losses[:, None]).to(hidden.dtype)
            if ctx.accumulates:
                d_weight = compat.add_to_main_grad(weight, inputs, gradient)
            else:
                d_weight = gradient.t() @ inputs
        return d_hidden, d_weight, None, None, None


def _apply(student: Projection, row_loss: _RowLoss) -> Tensor:
    hidden, weight, accumulates = student
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    losses = _LinearLoss.apply(hidden.flatten(0, 1), weight, row_loss, keeps, accumulates)
    return losses.view(hidden.shape[:2])


def from_all_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [ranks, ...] on all ranks."""
    if group.size() == 1:
        return x[None]
    out = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(out.unbind()), x, group=group)
    return out


def distillation_kl(
    student: Projection,
    teacher: Projection,
    divergence: Divergence,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute the KL per position, in nats times temperature squared.

    Args:
        student: With gradients to both of its tensors.
        teacher: Without gradients.
        divergence: Direction and temperature.
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.

    Returns:
        float32 [s, b], equal on all ranks of the group.
    """
    columns = valid_columns(student.weight.shape[0], vocab_size, group.rank())
    hidden, weight = teacher.hidden.detach().flatten(0, 1), teacher.weight.detach()
    temperature = divergence.temperature

    def row_loss(c: slice, logits: Tensor, differentiable: bool) -> Tensor:
        kernels = dispatch.vocabulary_losses(logits.device)
        p, q = divergence.ordered(logits, hidden[c] @ weight.t())
        statistics = kernels.divergence_statistics(p, q, columns, temperature)
        kl, rows = vocab_loss.merge_divergence(from_all_ranks(statistics, group))
        if differentiable:
            kernels.divergence_gradient_(p, q, columns, rows, divergence)
        return kl * temperature**2

    return _apply(student, row_loss)


def _without_support(
    logits: Tensor, ids: Tensor, columns: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Take the columns `ids` out of `logits`; return `vocabulary.merge_support` of all ranks."""
    support = vocab_loss.take_support_(logits, ids, columns) / temperature
    kernels = dispatch.vocabulary_losses(logits.device)
    tail = kernels.divergence_statistics(logits, logits, columns, temperature)[:2]
    everyone = from_all_ranks(torch.cat([tail, support.t()]), group)
    return vocab_loss.merge_support(everyone[:, :2], everyone[:, 2:].sum(0))


def support_kl(
    student: Projection,
    teacher: TopLogits,
    divergence: Divergence,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute the KL per position as `distillation_kl`, with a teacher that was stored.

    All tokens outside the teacher's support are one outcome of both distributions.

    Args:
        student: With gradients to both of its tensors.
        teacher: [b, s, k] and [b, s], with the temperature of `divergence`.
        divergence: Direction and temperature.
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.

    Returns:
        float32 [s, b], equal on all ranks of the group.
    """
    width, temperature = student.weight.shape[0], divergence.temperature
    columns = valid_columns(width, vocab_size, group.rank())
    log_probs, ids, log_tails = teacher.map(lambda x: x.transpose(0, 1).flatten(0, 1))

    def row_loss(c: slice, logits: Tensor, differentiable: bool) -> Tensor:
        local = ids[c].long() - group.rank() * width
        log_q, total = _without_support(logits, local, columns, temperature, group)
        # stored numbers are rounded, so that they do not add up to 1
        log_p = torch.cat([log_probs[c].float().t(), log_tails[None, c]]).log_softmax(0)
        kl, rows, gradient = vocab_loss.support_divergence(log_q, log_p, total, divergence)
        if differentiable:
            kernels = dispatch.vocabulary_losses(logits.device)
            kernels.divergence_gradient_(logits, logits, columns, rows, divergence)
            vocab_loss.add_at_(logits, local, columns, gradient.t())
        return kl * temperature**2

    return _apply(student, row_loss)


def top_logits(
    model: Projection, k: int, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> TopLogits:
    """Return the k most probable tokens of every position, and the mass of the others.

    Args:
        model: Factors of the logits, without gradients.
        k: At most `vocab_size`.
        temperature: Divides the logits.
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.

    Returns:
        float32 and int32 [s, b, k] and float32 [s, b], equal on all ranks of the group.
    """
    hidden, width = model.hidden.flatten(0, 1), model.weight.shape[0]
    columns = valid_columns(width, vocab_size, group.rank())
    parts = []
    for c in _chunks(len(hidden), width, hidden.device):
        logits = hidden[c] @ model.weight.t()
        ids = _largest(logits[:, :columns], k, group, width)
        local = ids - group.rank() * width
        outcomes, _ = _without_support(logits, local, columns, temperature, group)
        parts.append(TopLogits(outcomes[:-1].t(), ids.int(), outcomes[-1]))
    joined = TopLogits(*map(torch.cat, zip(*parts, strict=True)))
    return joined.map(lambda x: x.unflatten(0, model.hidden.shape[:2]))


def _largest(logits: Tensor, k: int, group: dist.ProcessGroup, width: int) -> Tensor:
    """Return the tokens int64 [rows, k] with the largest logits of all ranks' columns."""
    values, ids = logits.topk(min(k, logits.shape[1]))
    missing = (0, k - values.shape[1])
    values = F.pad(values, missing, value=-torch.inf)
    ids = F.pad(ids + group.rank() * width, missing)
    values, ids = (from_all_ranks(x, group).movedim(0, 1).flatten(1) for x in (values, ids))
    return ids.gather(1, values.topk(k).indices)


def next_token_loss(
    student: Projection, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """Compute the cross-entropy, float32 [s, b] in nats, equal on all ranks of the group.

    Args:
        student: With gradients to both of its tensors.
        labels: int64 [b, s].
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.
    """
    width = student.weight.shape[0]
    columns = valid_columns(width, vocab_size, group.rank())
    local = labels.t().flatten() - group.rank() * width

    def row_loss(c: slice, logits: Tensor, differentiable: bool) -> Tensor:
        kernels = dispatch.vocabulary_losses(logits.device)
        here = (local[c] >= 0) & (local[c] < width)
        targets = logits.gather(1, torch.where(here, local[c], 0)[:, None])[:, 0]
        targets = torch.where(here, targets.float(), 0.0)
        own = torch.cat([kernels.nll_statistics(logits, columns), targets[None]])
        everyone = from_all_ranks(own, group)
        nll, rows = vocab_loss.merge_nll(everyone[:, :2], everyone[:, 2].sum(0))
        if differentiable:
            kernels.nll_gradient_(logits, columns, rows, local[c])
        return nll

    return _apply(student, row_loss)


class OutputLosses(NamedTuple):
    """Inputs of a token loss: `method.token_losses.VocabularyLosses` on sharded logits.

    Attributes:
        student: With gradients to both of its tensors.
        teacher: Without gradients; None if no teacher runs.
        labels: int64 [b, s].
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.
        stored: Teacher that was stored, [b, s, k] and [b, s]; None if there is none.
    """

    student: Projection
    teacher: Projection | None
    labels: Tensor
    vocab_size: int
    group: dist.ProcessGroup
    stored: TopLogits | None = None

    def divergence(self, direction: str, temperature: float) -> Tensor:
        """Compute the KL divergence [s, b] of student and teacher, times temperature squared."""
        divergence = Divergence(direction, temperature)
        if self.stored is not None:
            return support_kl(self.student, self.stored, divergence, self.vocab_size, self.group)
        teacher = self._attached_teacher()
        return distillation_kl(self.student, teacher, divergence, self.vocab_size, self.group)

    def cross_entropy(self) -> Tensor:
        """Compute the cross-entropy [s, b] of the student and the next token."""
        return next_token_loss(self.student, self.labels, self.vocab_size, self.group)

    def teacher_cross_entropy(self) -> Tensor:
        """Compute the cross-entropy [s, b] of the teacher and the next token."""
        teacher = self._attached_teacher()
        return next_token_loss(teacher, self.labels, self.vocab_size, self.group)

    def _attached_teacher(self) -> Projection:
        if self.teacher is None:
            raise ModelError("the loss needs a teacher and none is attached; set model.path")
        return self.teacher
