"""Memory use of this process."""

from __future__ import annotations

import psutil
import torch


def own_memory(device: torch.device) -> float:
    """Return bytes: on a GPU the peak of torch's allocator, on a CPU the present use."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    return float(psutil.Process().memory_info().rss)
