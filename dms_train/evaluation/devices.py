"""The device that a measurement runs on."""

from __future__ import annotations

import torch

from dms_train.evaluation.errors import EvaluationError


def resolve_device(device: str) -> str:
    """The torch device that `auto`, `cpu` or `cuda` stands for; EvaluationError without a GPU."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise EvaluationError("device=cuda: this machine has no GPU; use auto or cpu")
    if device == "auto":
        return "cuda" if present else "cpu"
    return device
