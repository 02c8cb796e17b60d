"""Device of a measurement."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.devices import require_device
from dms_train.inference.errors import InferenceError

_GIB = 2**30
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def resolve_device(device: str) -> str:
    """Return the torch device for `auto`, `cpu`, `cuda` or `cuda:1`.

    Raises:
        EvaluationError: There is no such device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        require_device(device)
    except InferenceError as error:
        raise EvaluationError(str(error)) from None
    return device


def require_memory(directory: Path, device: str) -> None:
    """Refuse a model whose weights alone do not fit the free memory of a GPU.

    Raises:
        EvaluationError: The weights do not fit.
    """
    if not device.startswith("cuda"):
        return
    reader = WeightReader(directory)  # dequantised weights take more than their files
    weights = sum(prod(reader.shape(name)) * _BYTES[reader.dtype(name)] for name in reader.names())
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    # torch keeps memory that a training in this process has freed for later allocations
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if weights > free:
        raise EvaluationError(
            f"{directory}: its weights take {weights / _GIB:.1f} GiB, {device} has "
            f"{free / _GIB:.1f} GiB free; take a larger GPU or device=cpu, or export in bf16"
        )
