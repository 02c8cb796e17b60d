"""`dms-train` that waits before one of its steps, so that a test can act in the middle of a run.

python -m tests.support.paused_run STEP FOLDER WORDS...

Each rank then writes FOLDER/paused-RANK. All continue when one of them has handled a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from dms_train.cli import train
from dms_train.mcore.engine import McoreEngine


def command(step: int, folder: Path, words: list[str]) -> list[str]:
    """Words for Python; the step is numbered from 0."""
    return ["-m", "tests.support.paused_run", str(step), str(folder), *words]


def wait_for_pause(folder: Path, ranks: int, running: Callable[[], bool]) -> None:
    """Return when all ranks wait; AssertionError when the run ends before."""
    while any(not (folder / f"paused-{rank}").exists() for rank in range(ranks)):
        assert running(), "the run ended before it paused"
        time.sleep(0.02)


def train_with_pause(step: int, folder: Path, *words: str) -> None:
    """Run `dms-train WORDS` in this process."""
    take_step = McoreEngine.train_step

    def waits_before(engine: McoreEngine, plan: Any, *further: Any) -> Any:
        if plan.step == step:
            _pause(folder)
        return take_step(engine, plan, *further)

    McoreEngine.train_step = waits_before  # type: ignore[method-assign]
    sys.argv = ["dms-train", *words]
    train.main()


def _pause(folder: Path) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, _also_continue(signal.getsignal(number), folder))
    (folder / f"paused-{os.environ.get('RANK', '0')}").touch()
    while not (folder / "signalled").exists():
        time.sleep(0.01)


def _also_continue(handler: Any, folder: Path) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        (folder / "signalled").touch()

    return handle


if __name__ == "__main__":
    train_with_pause(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
