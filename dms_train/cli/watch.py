"""What a started run tells its launcher, and how the launcher tells it to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import FrameType

from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.observe.log import logger
from dms_train.observe.state_files import StateFiles

# SIGUSR1: the time is nearly up. SIGTERM: a preemption, a node that is drained, a person.
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@dataclass(slots=True)
class RunWatch:
    """Turns signals into a stop that all ranks take after the same step.

    Signals reach the ranks in different steps and may reach one rank only; every rank asks
    `must_stop` after every step, and all hear yes as soon as one was signalled.
    """

    files: StateFiles
    view: ParallelView
    signalled: str | None = field(default=None, init=False)

    def listen(self) -> None:
        """From here on a signal stops the run after the current step instead of ending it."""
        for number in _SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signalled = signal.Signals(number).name

    def beat(self) -> None:
        """Touch the heartbeat."""
        if self.view.rank == 0:
            self.files.beat()

    def must_stop(self) -> bool:
        """Whether any rank was signalled."""
        return groups.any_rank(self.signalled is not None, self.view)

    def stopped(self, step: int) -> None:
        """Everything is saved; say so."""
        if self.view.rank == 0:
            self.files.stopped(step)
        why = self.signalled or "a signal to another rank"
        logger().info("stopped after step %d (%s); the same command continues it", step, why)

    def done(self, stage: str, step: int) -> None:
        """A stage is finished."""
        if self.view.rank == 0:
            self.files.done(stage, step)
