"""Divergence of distributions whose tokens outside a support are merged, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.kernels.losses.vocabulary import Divergence


def merged(logits: Tensor, support: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities [..., k + 1] of logits [..., vocab]: the support, then the rest."""
    logits = (logits / temperature).log_softmax(-1)
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, support, value=True)
    rest = logits.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, support), rest], -1)


def merged_divergence(
    student: Tensor, teacher: Tensor, support: Tensor, task: Divergence
) -> Tensor:
    """Return the KL [...] of logits [..., vocab] if all tokens outside `support` are one."""
    outcomes = (merged(x, support, task.temperature) for x in (student, teacher))
    p, q = task.ordered(*outcomes)
    return (p.exp() * (p - q)).sum(-1) * task.temperature**2
