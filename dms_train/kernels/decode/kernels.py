"""The decode kernels, imported on first use, as triton may not be installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


def runs_on(device: torch.device) -> bool:
    """Whether the decode kernels run there: on a GPU, or in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def overlaps(device: torch.device) -> bool:
    """Whether a kernel there may be launched while the one before it still runs (Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def kernels() -> tuple[Any, Any]:
    """The modules `triton_append` and `triton_attention`."""
    package = "dms_train.kernels.decode"
    return (
        importlib.import_module(f"{package}.triton_append"),
        importlib.import_module(f"{package}.triton_attention"),
    )


def page_kernels() -> Any:
    """The module `triton_pages`."""
    return importlib.import_module("dms_train.kernels.decode.triton_pages")
