"""A barrier after the imports, so that a short timeout does not include them."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist


def meet() -> None:
    """Return when all ranks of this launch have called this."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=4))
    store.add("ranks_met", 1)
    while store.add("ranks_met", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
