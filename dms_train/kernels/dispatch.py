"""Typed entry points of the kernels; no code outside this package imports a Triton module.

An engine calls `triton_kernels()` once and uses the functions of the result:

    kernels = dispatch.triton_kernels()
    memory = kernels.attention_workspace(query, cache)           # once per batch size
    rotated = kernels.append(step, cache, decisions)             # store one token per sequence
    output = kernels.attend(rotated, cache, step.rows, scale, memory)

`decode.interface`, `prefill.interface` and `layers.interface` document the functions. A backend is
a module that has them. Modules are imported on first use, because Triton may not be installed.
"""

from __future__ import annotations

import importlib.util
from functools import cache as cached
from typing import Protocol

import torch

from dms_train.kernels.decode.interface import DecodeKernels, PagedAttention
from dms_train.kernels.errors import KernelError
from dms_train.kernels.layers.interface import LayerKernels
from dms_train.kernels.losses import vocabulary
from dms_train.kernels.losses.interface import VocabularyLosses
from dms_train.kernels.prefill.interface import PrefillKernels
from dms_train.kernels.train_attention import blockwise, reference
from dms_train.kernels.train_attention.interface import DMSAttention

_CPU_REASONS = {
    "triton": "its kernels need a GPU",
    "flex": "FlexAttention has no backward pass there",
}


class Kernels(DecodeKernels, PrefillKernels, LayerKernels, Protocol):
    """All inference kernels."""


def is_supported(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device: a GPU, or a CPU in the interpreter."""
    if not _has_triton():
        return False
    if device.type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)


@cached
def triton_kernels() -> Kernels:
    """Return the kernels in Triton; see `is_supported`."""
    from dms_train.kernels import triton_backend

    return triton_backend


@cached
def reference_kernels() -> PagedAttention:
    """Return decode attention in plain loops and float64, on any device."""
    from dms_train.kernels.decode import reference as decode_reference

    return decode_reference


def train_attention(name: str) -> DMSAttention:
    """Return the training attention of a backend that `choose_train_attention` returned."""
    if name == "triton":
        from dms_train.kernels.train_attention.triton_attention import dms_attention as triton

        return triton
    if name == "flex":
        from dms_train.kernels.train_attention.flex import dms_attention as flex

        return flex
    plain: dict[str, DMSAttention] = {
        "blockwise": blockwise.dms_attention,
        "reference": reference.dms_attention,
    }
    return plain[name]


def choose_train_attention(name: str, device: torch.device, *, decays: bool = False) -> str:
    """Return the backend of the training attention for a configured name.

    Args:
        name: One of `kernels.options.KERNELS`; `auto` is triton on a GPU, blockwise elsewhere.
        device: Device of the training.
        decays: Whether the bias grows with the distance; `auto` is then flex on a GPU.

    Raises:
        KernelError: The backend cannot train there.
    """
    on_gpu = device.type == "cuda"
    if name == "auto":
        fused = "flex" if decays else "triton"
        return fused if on_gpu and _has_triton() else "blockwise"
    if decays and name == "triton":
        raise KernelError("kernels=triton: has no bias that grows with distance; use kernels=auto")
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


def can_fuse(name: str) -> bool:
    """Return whether activation, RoPE and decisions run as fused kernels beside the attention.

    They belong to the triton backend, so that every other backend runs without Triton.
    """
    return name == "triton"


def vocabulary_losses(device: torch.device) -> VocabularyLosses:
    """Return the losses over a vocabulary: fused on a GPU, torch operations elsewhere."""
    if device.type == "cuda":
        from dms_train.kernels.losses import triton_vocabulary

        return triton_vocabulary
    return vocabulary


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
