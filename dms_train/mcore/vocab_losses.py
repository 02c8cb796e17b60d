"""Per-token losses on vocabulary-sharded logits; with one shard they equal `method.losses`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor


def valid_columns(width: int, vocab_size: int, shard: int) -> int:
    """How many columns of a vocabulary shard are not padding."""
    return max(0, min(width, vocab_size - width * shard))


# Positions whose logits exist in fp32 at a time.
_CHUNK = 512


def _ordered(student: Tensor, teacher: Tensor, direction: str) -> tuple[Tensor, Tensor]:
    """(p, q) of KL(p || q), in fp32."""
    pair = (teacher, student) if direction == "teacher_student" else (student, teacher)
    return pair[0].float(), pair[1].float()


def _row_maxima(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return torch.full(logits.shape[:-1], float("-inf"), device=logits.device)
    return logits.amax(-1).float()


class _KL(torch.autograd.Function):
    """KL(p || q) per position for p = softmax(a), q = softmax(b), with a gradient to the student.

    Two all-reduces of a few numbers per position forward, none backward. What is kept for the
    backward pass has the dtype of the logits; fp32 copies exist for one chunk at a time.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, direction: str, group: Any) -> Tensor:
        top = torch.stack([_row_maxima(student), _row_maxima(teacher)])
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        top_p, top_q = top.flip(0) if direction == "teacher_student" else top
        chunks = [slice(i, i + _CHUNK) for i in range(0, student.shape[0], _CHUNK)]
        sums = student.new_zeros(3, *student.shape[:-1], dtype=torch.float32)
        for c in chunks:
            p, q = _ordered(student[c], teacher[c], direction)
            exp_p = (p - top_p[c, ..., None]).exp()
            sums[0, c] = exp_p.sum(-1)
            sums[1, c] = (q - top_q[c, ..., None]).exp().sum(-1)
            sums[2, c] = (exp_p * (p - q)).sum(-1)
        dist.all_reduce(sums, group=group)
        log_p, log_q = sums[0].log() + top_p, sums[1].log() + top_q  # log partition functions
        kl = sums[2] / sums[0] - (log_p - log_q)
        if ctx.needs_input_grad[0]:
            gradient = torch.empty_like(student)
            for c in chunks:
                p, q = _ordered(student[c], teacher[c], direction)
                p, q = p - log_p[c, ..., None], q - log_q[c, ..., None]  # log probabilities
                if direction == "teacher_student":
                    gradient[c] = (q.exp() - p.exp()).to(student.dtype)
                else:
                    gradient[c] = (p.exp() * (p - q - kl[c, ..., None])).to(student.dtype)
            ctx.save_for_backward(gradient)
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        out = torch.empty_like(gradient)
        for first in range(0, gradient.shape[0], _CHUNK):
            c = slice(first, first + _CHUNK)
            out[c] = (gradient[c].float() * grad[c, ..., None]).to(gradient.dtype)
        return out, None, None, None


def distillation_kl(
    student: Tensor, teacher: Tensor, direction: str, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """KL per position, in nats, of the direction named as in `DMSSpec.kl_direction`.

    Args:
        student: [s, b, padded vocabulary / tp], with gradient.
        teacher: The same shape, without.
        direction: `teacher_student` is KL(teacher || student).
        vocab_size: Columns beyond it are padding and do not count.
        group: Tensor-parallel group the vocabulary is sharded over.

    Returns:
        float32 [s, b], equal on all ranks of the group.
    """
    valid = valid_columns(student.shape[-1], vocab_size, group.rank())
    return _KL.apply(student[..., :valid], teacher[..., :valid], direction, group)


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy [s, b] of logits [s, b, padded vocabulary / tp] and labels [b, s]."""
    width = logits.shape[-1]
    valid = valid_columns(width, vocab_size, group.rank())
    masked = F.pad(logits[..., :valid].float(), (0, width - valid), value=float("-inf"))
    return tensor_parallel.vocab_parallel_cross_entropy(masked, labels.t().contiguous())
