"""The device that a measurement runs on."""

from __future__ import annotations

import torch

from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.devices import require_device
from dms_train.inference.errors import InferenceError


def resolve_device(device: str) -> str:
    """The torch device that `auto`, `cpu`, `cuda` or `cuda:1` stands for.

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
