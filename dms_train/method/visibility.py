"""THE rule "may query i see key j". Kernels, caches and exports must agree with this file.

    visible(i, j) = j <= i and not (i - j > window and D[j + shift])

With `eviction: immediate` the decision is read window + shift positions later instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.method.base import MethodSpec
from dms_train.method.documents import PackedDocuments


def outside_window(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """Mark keys that have left the window of a query. Returns bool [queries, keys]."""
    return query_positions[:, None] - key_positions[None, :] > window


def align_to_keys(
    decisions: Tensor,
    spec: MethodSpec,
    keep: float | bool,
    documents: PackedDocuments | None = None,
) -> Tensor:
    """Move each decision to the key it governs.

    Args:
        decisions: [..., T], indexed by the position that took the decision; [b, g, T] with
            documents.
        spec: Gives the distance between the two.
        keep: Value that means "kept". Keys without a decision yet get it; they are always inside
            the window.
        documents: Packed documents; no decision governs a key of another one. None is one
            document for each sequence.

    Returns:
        [..., T], indexed by key.
    """
    shift = min(spec.governing_shift, decisions.shape[-1])
    aligned = F.pad(decisions[..., shift:], (0, shift), value=keep)
    if documents is None:
        return aligned
    positions = torch.arange(decisions.shape[-1], device=decisions.device)
    governed = positions + shift < documents.end
    return torch.where(governed[:, None], aligned, keep)


def visible(decisions: Tensor, spec: MethodSpec) -> Tensor:
    """Compute bool [..., T, T] from hard decisions [..., T] by deciding position."""
    positions = torch.arange(decisions.shape[-1], device=decisions.device)
    evicted = align_to_keys(decisions, spec, keep=False)
    late = outside_window(positions, positions, spec.window)
    causal = positions[None, :] <= positions[:, None]
    return causal & ~(late & evicted[..., None, :])
