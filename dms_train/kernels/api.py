"""The attention function every backend provides; callers name a backend, never a file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dms_train.kernels import blockwise, reference


class DMSAttention(Protocol):
    """Causal attention with a soft eviction bias; see `kernels.reference.dms_attention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_keep: Tensor | None,
        window: int,
        scale: float,
    ) -> Tensor:
        """Attend query [b, s, hq, d] to key and value [b, s, hk, d]."""
        ...


_BACKENDS: dict[str, DMSAttention] = {
    "blockwise": blockwise.dms_attention,
    "reference": reference.dms_attention,
}


def backend(name: str) -> DMSAttention:
    """The implementation with this name."""
    return _BACKENDS[name]
