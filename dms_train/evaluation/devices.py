"""The device that a measurement runs on."""

from __future__ import annotations

import torch

from dms_train.evaluation.errors import EvaluationError


def resolve_device(device: str) -> str:
    """The torch device that `auto`, `cpu`, `cuda` or `cuda:1` stands for.

    Raises:
        EvaluationError: There is no such GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        count = torch.cuda.device_count()
        if not count:
            raise EvaluationError(f"device={device}: this machine has no GPU; use auto or cpu")
        if (torch.device(device).index or 0) >= count:
            raise EvaluationError(f"device={device}: GPUs here are numbered from 0 to {count - 1}")
    return device
