"""The attention functions every backend provides; callers name a backend, never a file."""

from __future__ import annotations

from torch import Tensor

from dms_train.kernels import reference

BACKENDS = {"reference": reference.dms_attention}


def dms_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor | None,
    window: int,
    scale: float,
    backend: str = "reference",
) -> Tensor:
    """Causal attention with a soft eviction bias; see `kernels.reference.dms_attention`."""
    return BACKENDS[backend](query, key, value, log_keep, window, scale)
