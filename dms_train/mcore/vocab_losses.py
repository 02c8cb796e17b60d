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


class _KL(torch.autograd.Function):
    """KL(p || q) per position for p = softmax(a), q = softmax(b); gradient to one of them.

    Two all-reduces of a few numbers per position forward, none backward.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, direction: str, group: Any) -> Tensor:
        s, t = student.float(), teacher.float()
        p, q = (t, s) if direction == "teacher_student" else (s, t)
        top = torch.full((2, *s.shape[:-1]), float("-inf"), device=s.device)
        if s.shape[-1]:
            top = torch.stack([p.amax(-1), q.amax(-1)])
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        exp_p, exp_q = (p - top[0, ..., None]).exp(), (q - top[1, ..., None]).exp()
        sums = torch.stack([exp_p.sum(-1), exp_q.sum(-1), (exp_p * (p - q)).sum(-1)])
        dist.all_reduce(sums, group=group)
        z_p, z_q, cross = sums
        log_ratio = (z_p.log() + top[0]) - (z_q.log() + top[1])
        kl = cross / z_p - log_ratio
        prob_p, prob_q = exp_p / z_p[..., None], exp_q / z_q[..., None]
        if direction == "teacher_student":
            gradient = prob_q - prob_p
        else:
            gradient = prob_p * (p - q - log_ratio[..., None] - kl[..., None])
        ctx.save_for_backward(gradient)
        ctx.dtype = student.dtype
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[..., None]).to(ctx.dtype), None, None, None


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
