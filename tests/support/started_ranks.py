"""A run of `dms-train` in processes of their own, without a launcher that would end the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support import launch


@dataclass(frozen=True)
class StartedRun:
    """A run folder and the ranks that fill it; `folder.N.log` is what rank N printed."""

    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    @classmethod
    def start(cls, folder: Path, processes: int, words: list[str]) -> StartedRun:
        port, ranks = str(launch.free_ports(1)[0]), []
        for rank in range(processes):
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            with folder.with_suffix(f".{rank}.log").open("ab") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "dms_train", *words, f"run.dir={folder}"],
                        env=launch.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **where),
                        cwd=launch.ROOT,
                        stdout=log,
                        stderr=log,
                    )
                )
        return cls(folder, ranks)

    def log(self, rank: int) -> str:
        return self.folder.with_suffix(f".{rank}.log").read_text()[-4000:]

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> None:
        """While all ranks run."""
        end = time.monotonic() + seconds
        while not happened():
            for rank, process in enumerate(self.ranks):
                assert process.poll() is None, self.log(rank)
            assert time.monotonic() < end, self.log(0)
            time.sleep(0.002)

    def finish(self, seconds: float) -> list[int]:
        """The ranks' exit codes; none of them runs any more, whatever happens."""
        end = time.monotonic() + seconds
        try:
            return [rank.wait(max(0.1, end - time.monotonic())) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.send_signal(signal.SIGKILL)
                rank.wait()

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step_????????"))

    def unfinished(self) -> list[str]:
        """Names of checkpoints that are being written."""
        found = (self.folder / "checkpoints").glob("step_*.partial")
        return [path.name for path in found if ".old." not in path.name]
