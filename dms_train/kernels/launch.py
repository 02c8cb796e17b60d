"""Launch options that depend on the GPU."""

from __future__ import annotations

import torch


def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can be launched while the previous one runs (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
