"""KV slots held and read under a set of hard decisions.

`cr_factor` is tokens seen over slots held (a factor >= 1), never 1 / (1 - mean alpha), because
tokens in the window always count.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.method.base import MethodSpec
from dms_train.method.documents import PackedDocuments
from dms_train.method.visibility import align_to_keys


def live_slots(
    decisions: Tensor, spec: MethodSpec, documents: PackedDocuments | None = None
) -> Tensor:
    """Count the slots of its own document that each query attends to. Returns int64 [..., T].

    Args:
        decisions: bool [..., T]; [b, g, T] with documents.
        spec: Constants of the method.
        documents: Packed documents; None is one document for each sequence.
    """
    length = decisions.shape[-1]
    evicted = align_to_keys(decisions, spec, keep=False, documents=documents).long().cumsum(-1)
    seen = torch.arange(1, length + 1, device=decisions.device).expand(decisions.shape)
    gone = torch.zeros_like(seen)
    gone[..., spec.window + 1 :] = evicted[..., : max(0, length - spec.window - 1)]
    if documents is not None:
        first = documents.first[:, None].expand(decisions.shape)
        before = F.pad(evicted, (1, 0)).gather(-1, first)
        seen, gone = seen - first, (gone - before).clamp(min=0)
    return seen - gone


def slots_held_and_read(
    decisions: Tensor, spec: MethodSpec, documents: PackedDocuments | None = None
) -> tuple[Tensor, Tensor]:
    """Count slots held at the last token, and slots read by all queries; both int64 [b, g].

    Args:
        decisions: bool [b, g, T].
        spec: Constants of the method.
        documents: Packed documents, which are summed for each sequence; None is one document for
            each sequence.
    """
    live = live_slots(decisions, spec, documents)
    if documents is None:
        return live[..., -1], live.sum(-1)
    held, read = (live * mask[:, None] for mask in (documents.is_last, documents.is_token))
    return held.sum(-1), read.sum(-1)


def cr_factor(decisions: Tensor, spec: MethodSpec) -> float:
    """Return T / mean live slots at the last token; decisions are bool [..., T]."""
    return decisions.shape[-1] / live_slots(decisions, spec)[..., -1].double().mean().item()


def kv_reads(decisions: Tensor, spec: MethodSpec) -> float:
    """Sum the attended slots over the queries; average over everything except positions."""
    return live_slots(decisions, spec).sum(-1).double().mean().item()
