"""The device of an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from dms_train.inference.errors import InferenceError


def require_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Args:
        device: As torch names it, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        InferenceError: There is no such device.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InferenceError(f"device={device}: use cpu, cuda or cuda:1") from None
    if found.type != "cuda":
        return
    count = torch.cuda.device_count()
    if not count:
        raise InferenceError(f"device={device}: this machine has no GPU; use cpu")
    if (found.index or 0) >= count:
        raise InferenceError(f"device={device}: GPUs here are numbered from 0 to {count - 1}")


def launches_on(device: str) -> AbstractContextManager[None]:
    """Has kernels launched on a GPU such as `cuda:1`; `cuda` is the one that is current."""
    return nullcontext() if torch.device(device).index is None else torch.cuda.device(device)
