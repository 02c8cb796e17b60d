"""Rank 0 fails while a collective of its is under way, which rank 1 never joins.

torchrun ... -m tests.support.failing_worker refusal|bug
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from dms_train.cli import errors
from dms_train.config.build import ConfigError
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions

FAILURES = {"refusal": ConfigError, "bug": TypeError}


def main() -> None:
    view = groups.start(ParallelOptions(distributed_timeout_minutes=60), 0)
    dist.barrier()
    if view.rank == 0:
        dist.all_reduce(torch.ones(1000), async_op=True)
        raise FAILURES[sys.argv[1]]("rank 0 has a reason")
    while True:  # until the launcher, which has lost rank 0, ends this one
        time.sleep(1)


if __name__ == "__main__":
    errors.run_process(main)
