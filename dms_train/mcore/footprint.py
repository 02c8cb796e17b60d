"""Memory that this process takes."""

from __future__ import annotations

import psutil
import torch


def own_memory(device: torch.device) -> float:
    """Bytes: on a GPU the most that torch's allocator ever reserved, on a CPU what is held now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    return float(psutil.Process().memory_info().rss)
