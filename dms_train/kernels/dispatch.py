"""Typed entry points of the kernels; nothing outside of this package imports a Triton module.

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
from dms_train.kernels.layers.interface import LayerKernels
from dms_train.kernels.prefill.interface import PrefillKernels


class Kernels(DecodeKernels, PrefillKernels, LayerKernels, Protocol):
    """All inference kernels."""


def is_supported(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device: a GPU, or a CPU in the interpreter."""
    if importlib.util.find_spec("triton") is None:
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
    from dms_train.kernels.decode import reference

    return reference
