"""The attention function every backend provides; callers name a backend, never a file.

Backends are imported on first use: `triton` need not be installed where it is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol, cast

import torch
from torch import Tensor

from dms_train.kernels.errors import KernelError

_MODULES = {
    "triton": "triton_attention",
    "flex": "flex",
    "blockwise": "blockwise",
    "reference": "reference",
}
_CPU_REASONS = {
    "triton": "its kernels need a GPU",
    "flex": "FlexAttention has no backward pass there",
}


class DMSAttention(Protocol):
    """Causal attention with a soft eviction bias; see `train_attention.reference`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_keep: Tensor | None,
        window: int,
        scale: float,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Attend query [b, s, hq, d] to key and value [b, s, hk, d]."""
        ...


def backend(name: str) -> DMSAttention:
    """The implementation with this name, one that `choose` returned."""
    module = importlib.import_module(f"dms_train.kernels.train_attention.{_MODULES[name]}")
    return cast(DMSAttention, module.dms_attention)


def choose(name: str, device: torch.device) -> str:
    """The backend that a configured name stands for on a device.

    Args:
        name: One of `kernels.options.KERNELS`; `auto` is triton on a GPU, blockwise elsewhere.
        device: Where the training computes.

    Raises:
        KernelError: The backend cannot train there.
    """
    on_gpu = device.type == "cuda"
    if name == "auto":
        return "triton" if on_gpu and _has_triton() else "blockwise"
    if name in _CPU_REASONS and not on_gpu:
        raise KernelError(
            f"kernels={name}: training runs on the {device.type.upper()} and "
            f"{_CPU_REASONS[name]}; use kernels=auto"
        )
    if name == "triton" and not _has_triton():
        raise KernelError(
            "kernels=triton: triton is not installed; install it, or use kernels=flex"
        )
    return name


def fuses(name: str) -> bool:
    """Whether the kernels beside attention run too: activation, RoPE and decisions.

    They belong to the triton backend, so that every other backend runs without Triton.
    """
    return name == "triton"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
