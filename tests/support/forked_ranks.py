"""Ranks of a real run, forked from a process that has imported everything already.

Starting four interpreters takes longer than most faults; the forks call the same command. The
process that forks must have no threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dms_train.app.session  # noqa: F401 - imported once, before the forks
from dms_train.cli.train import main
from tests.support import launch

Prepare = Callable[[int], None]


def _nothing(_rank: int) -> None:
    pass


@dataclass(slots=True)
class Ranks:
    """The processes of one start of a run."""

    pids: list[int]
    codes: dict[int, int]

    @classmethod
    def start(cls, world: int, words: list[str], log: Path, prepare: Prepare = _nothing) -> Ranks:
        """Start `dms-train WORDS` in that many ranks.

        Args:
            world: How many.
            words: Overrides of the configuration.
            log: What they print is appended to `LOG.RANK`.
            prepare: Called with the rank before the command, in its process.
        """
        port = str(launch.free_ports(1)[0])
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                os.environ |= {**where, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                _be_a_rank(words, log.with_suffix(f".{rank}"), lambda rank=rank: prepare(rank))
            pids.append(pid)
        return cls(pids, {})

    def running(self) -> bool:
        """Whether all of them still run."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return not self.codes

    def wait(self, seconds: float) -> bool:
        """Until all have ended; whether they did in time."""
        end = time.monotonic() + seconds
        while len(self.codes) < len(self.pids) and time.monotonic() < end:
            self.running()
            time.sleep(0.02)
        return len(self.codes) == len(self.pids)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one that may have ended."""
        if rank not in self.codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def clear(self) -> None:
        """End what still runs, as a launcher does after it has lost a rank."""
        for number, patience in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 30)):
            for rank in range(len(self.pids)):
                self.signal(rank, number)
            if self.wait(patience):
                return


def _be_a_rank(words: list[str], log: Path, prepare: Callable[[], None]) -> None:
    """Never returns."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["dms-train", *words]
        prepare()
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
