"""Memory that processes take."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist


def most_memory(device: torch.device) -> float:
    """Bytes of the fullest process; every rank calls it.

    On a GPU the most that torch's allocator ever reserved, on a CPU what the process holds now.
    """
    if device.type == "cuda":
        own = torch.cuda.max_memory_reserved(device)
    else:
        own = psutil.Process().memory_info().rss
    most = torch.tensor(float(own), dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()
