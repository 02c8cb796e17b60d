"""Ranks that stall, and ranks that only take long."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dms_train.app.watch import end_hanging_run
from dms_train.data.tokens import TokenSamples
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions
from dms_train.observe import log
from dms_train.observe.heartbeats import Heartbeats
from dms_train.observe.state_files import StateFiles
from tests.support.meeting import meet
from tests.support.ranks import dms_train

TIMEOUT_SECONDS = 12.0
STEP = 3  # the last one whose samples can be read


def read_from_a_hanging_disk() -> bytes:
    reading, _writing = os.pipe()
    return os.read(reading, 1)


def hang_the_disk(first: int) -> None:
    """From this sample on none arrives in this process."""
    inner = TokenSamples.__getitem__

    def read(samples: TokenSamples, number: int) -> Any:
        if number >= first:
            read_from_a_hanging_disk()
        return inner(samples, number)

    TokenSamples.__getitem__ = read  # type: ignore[method-assign]


def train_with_a_hanging_disk(*words: str) -> int:
    """Samples of the global batch (8) that follows some step never arrive on rank 1."""
    if os.environ["RANK"] == "1":
        hang_the_disk(8 * STEP)
    return dms_train(*words)


class Together:
    """Two ranks with heartbeats, and a process group with a timeout of `timeout` seconds."""

    def __init__(self, folder: Path, timeout: float) -> None:
        options = ParallelOptions(distributed_timeout_minutes=timeout / 60)
        meet()
        self.view = groups.start(options, 0)
        self.heartbeats = Heartbeats(
            folder=folder / "ranks",
            rank=self.view.rank,
            ranks=self.view.world_size,
            patience=TIMEOUT_SECONDS / 2,
            hang=end_hanging_run(StateFiles(folder)),
        )
        log.configure(self.view.rank)
        self.heartbeats.start()
        self.heartbeats.reached(0)
        self.folder = folder

    def others_waited(self, patiences: float) -> bool:
        """Return True if rank 1 has waited for that many times the limit."""
        try:
            report = json.loads((self.folder / "ranks" / "1").read_text())
        except (FileNotFoundError, ValueError):  # it is just writing
            return False
        return report["phase"] == "step" and report["seconds"] > patiences * TIMEOUT_SECONDS / 2

    def take_long(self) -> str:
        """Outside of any phase with a limit, until the other rank has waited for three limits."""
        while not self.others_waited(3):
            threading.Event().wait(0.1)
        return "done"

    def wait_for_each_other(self) -> None:
        mine = [dist.new_group() for _ in range(2)][self.view.rank]
        with self.heartbeats.phase("step"):
            dist.barrier(group=mine)


def patient(folder: Path) -> None:
    """Rank 1 waits for rank 0, which is slow but works."""
    ranks = Together(folder, TIMEOUT_SECONDS)
    with ranks.heartbeats.phase("other" if ranks.view.rank == 0 else "step"):
        assert groups.of_rank_0(ranks.take_long) == "done"
    ranks.heartbeats.stop()
    groups.stop()


def deadlock(folder: Path) -> None:
    """Each rank waits for the other."""
    # on a busy machine the stall may be noticed late, but before the process group gives up
    Together(folder, 10 * TIMEOUT_SECONDS).wait_for_each_other()
