"""Reports of a run to its launcher, and the launcher's requests to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType

from dms_train.app import failures, launcher
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.observe.heartbeats import Heartbeats, Phase
from dms_train.observe.log import logger
from dms_train.observe.state_files import StateFiles

# SIGUSR1: the time limit is near. SIGTERM: a preemption, a drained node, or the user.
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def end_hanging_run(files: StateFiles) -> Callable[[str | None], None]:
    """Log that ranks hang, and end this process, whose main thread waits."""

    def end(reason: str | None) -> None:
        if reason is None:
            os._exit(failures.REFUSED)
        error = failures.RankHangs(
            f"{reason}; the run ends here. Start the same command again to resume from the newest "
            "checkpoint"
        )
        lines = failures.describe(error)
        attempt = launcher.attempt()
        with contextlib.suppress(OSError):
            if attempt is not None:
                files.failed(launcher.rank(), attempt, error, lines)
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
        os._exit(failures.REFUSED)

    return end


@dataclass(slots=True)
class RunWatch:
    """Listener for signals; it makes all ranks stop after the same step.

    Signals reach the ranks in different steps and may reach one rank only; every rank calls
    `must_stop` after every step, and all get True as soon as one was signalled.
    """

    files: StateFiles
    view: ParallelView
    heartbeats: Heartbeats
    signalled: str | None = field(default=None, init=False)

    def listen(self) -> None:
        """Let a signal stop the run after the current step instead of ending it."""
        for number in _SIGNALS:
            signal.signal(number, self._remember)

    @contextlib.contextmanager
    def expecting_ranks(self, engine: McoreEngine) -> Iterator[None]:
        """End the run if a rank ends, stops or stalls inside the block.

        Call it after data and model are built: while Megatron builds a data index, no other
        thread of the process runs.
        """
        if self.view.world_size > 1:
            engine.on_microbatch = self.heartbeats.progressed
            self.heartbeats.start()
        try:
            yield
        except BaseException:
            self.leave(in_order=False)
            raise
        self.leave()

    def leave(self, *, in_order: bool = True) -> None:
        """Record that the run, or this rank's part of it, is over; later calls change nothing."""
        self.heartbeats.stop(in_order=in_order)
        # the batch script repeats it, which would kill an interpreter that is shutting down
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signalled = signal.Signals(number).name

    def beat(self, step: int) -> None:
        """Touch the heartbeat."""
        self.heartbeats.reached(step)
        if self.view.rank == 0:
            self.files.beat()

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Mark the phase of the main thread inside the block; a phase may have a time limit."""
        return self.heartbeats.phase(name)

    def must_stop(self) -> bool:
        """Return whether any rank was signalled."""
        return groups.any_rank(self.signalled is not None, self.view)

    def stopped(self, step: int) -> None:
        """Log that everything is saved, and write the state file."""
        if self.view.rank == 0:
            self.files.stopped(step)
        why = self.signalled or "a signal to another rank"
        logger().info("stopped after step %d (%s); the same command continues it", step, why)

    def done(self, stage: str, step: int) -> None:
        """Record that a stage is finished."""
        if self.view.rank == 0:
            self.files.done(stage, step)
