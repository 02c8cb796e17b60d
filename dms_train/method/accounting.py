"""KV slots held and read under a set of hard decisions.

`cr_factor` is tokens seen over slots held (a factor >= 1), never 1 / (1 - mean alpha): tokens in
the window always count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.method.spec import DMSSpec
from dms_train.method.visibility import align_to_keys


def live_slots(decisions: Tensor, spec: DMSSpec) -> Tensor:
    """Slots held when each query attends. decisions: bool [..., T]. Returns int64 [..., T]."""
    length = decisions.shape[-1]
    evicted = align_to_keys(decisions, spec, keep=False).long().cumsum(-1)
    seen = torch.arange(1, length + 1, device=decisions.device).expand(decisions.shape)
    gone = torch.zeros_like(seen)
    gone[..., spec.window + 1 :] = evicted[..., : max(0, length - spec.window - 1)]
    return seen - gone


def cr_factor(decisions: Tensor, spec: DMSSpec) -> float:
    """T / mean live slots at the last token. decisions: bool [..., T] (layers, heads, samples)."""
    return decisions.shape[-1] / live_slots(decisions, spec)[..., -1].double().mean().item()


def kv_reads(decisions: Tensor, spec: DMSSpec) -> float:
    """Attended slots summed over the queries, averaged over everything but positions."""
    return live_slots(decisions, spec).sum(-1).double().mean().item()
