"""One function in several ranks on this machine, as a launcher would start them.

`run_ranks` calls a function and waits; `Ranks` starts one and lets a test signal its processes. A
function is named by its module, so it must stand at the top of one; its arguments and its result
are pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.support import launch
from tests.support.fork_server import ROOT, Started

_MODULE = "tests.support.ranks"


class Outcome(NamedTuple):
    """Ranks that have ended: `returncode` is that of the first that failed, or 0."""

    returncode: int
    stdout: str
    stderr: str
    values: list[Any]


def dms_train(*words: str) -> int:
    """Run `dms-train WORDS` in this process and return its exit code."""
    from dms_train.cli.train import main

    sys.argv = ["dms-train", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)


def run_ranks(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    timeout: float = 300,
    **environment: str,
) -> Outcome:
    """Call a function in that many ranks; when one fails, the others are killed.

    Args:
        function: Stands at the top of its module. What it returns must be pickled.
        processes: Number of ranks.
        arguments: Passed to the function.
        timeout: Seconds, after which `subprocess.TimeoutExpired` is raised.
        environment: Variables of the ranks.

    Returns:
        The exit code, the output of all ranks in their order, and what each of them returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ranks = Ranks.start(function, processes, *arguments, log=log, **environment)
        try:
            failed = ranks.wait_for_success(timeout)
        finally:
            ranks.kill()
        texts = [
            "".join(ranks.output(rank, stream) for rank in range(processes))
            for stream in ("out", "err")
        ]
        values = [] if failed else [ranks.value(rank) for rank in range(processes)]
    code = failed if failed >= 0 else 128 - failed
    return Outcome(code, *texts, values)


def values_of_ranks(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """Call a function in that many ranks, which must succeed; return what each of them returned."""
    outcome = run_ranks(function, processes, *arguments, timeout=500)
    launch.checked(outcome)
    return outcome.values


@dataclass(slots=True)
class Ranks:
    """Running ranks. `LOG.N.out` and `LOG.N.err` are what rank N printed.

    They are forked from a process that has imported the dependencies, except with GPUs, which forks
    cannot use. As with torchrun the store in which they meet belongs to none of them.
    """

    processes: list[Started | subprocess.Popen[bytes]]
    codes: dict[int, int]
    log: Path
    store: dist.TCPStore

    @classmethod
    def start(
        cls,
        function: Callable[..., Any],
        processes: int,
        *arguments: Any,
        log: Path,
        **environment: str,
    ) -> Ranks:
        """Start the function in that many ranks; `log` is appended to."""
        name = f"{function.__module__}:{function.__qualname__}"
        log.with_suffix(".call").write_bytes(pickle.dumps((name, arguments)))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        started = []
        for rank in range(processes):
            words = launch.environment(**common, RANK=str(rank), LOCAL_RANK=str(rank))
            started.append(_start({**words, **environment}, log, rank))
        return cls(started, {}, log, store)

    def running(self) -> bool:
        """Return True if all of them still run."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None:
                self.codes.setdefault(rank, code)
        return not self.codes

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended; False if they did not in time."""
        end = time.monotonic() + seconds
        while len(self.codes) < len(self.processes) and time.monotonic() < end:
            self.running()
            time.sleep(0.01)
        return len(self.codes) == len(self.processes)

    def wait_for_success(self, seconds: float) -> int:
        """Wait until all have ended or one has failed; return its exit code, or 0."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.running()
            failed = next((code for code in self.codes.values() if code), 0)
            if failed or len(self.codes) == len(self.processes):
                return failed
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.log.name, seconds)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that may have ended."""
        if rank not in self.codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def clear(self) -> None:
        """End what still runs, as a launcher does after it has lost a rank."""
        for number, patience in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 30)):
            for rank in range(len(self.processes)):
                self.signal(rank, number)
            if self.wait(patience):
                return

    def kill(self) -> None:
        """Kill what still runs."""
        for rank in range(len(self.processes)):
            self.signal(rank, signal.SIGKILL)
        self.wait(30)

    def output(self, rank: int, stream: str = "err") -> str:
        """Return what a rank printed, `out` or `err`."""
        return _stream(self.log, rank, stream).read_text()

    def value(self, rank: int) -> Any:
        """Return what the function returned in a rank that has ended with exit code 0."""
        return pickle.loads(self.log.with_suffix(f".{rank}.value").read_bytes())


def _stream(log: Path, rank: int, name: str) -> Path:
    return log.with_suffix(f".{rank}.{name}")


def _start(environment: dict[str, str], log: Path, rank: int) -> Started | subprocess.Popen[bytes]:
    address = launch.fork_server()
    with (
        open(os.devnull) as nothing,
        _stream(log, rank, "out").open("a") as out,
        _stream(log, rank, "err").open("a") as err,
    ):
        if address is None:
            return subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(log)],
                env=environment,
                cwd=ROOT,
                stdout=out,
                stderr=err,
            )
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        return Started(address, _MODULE, [str(log)], environment, ROOT, streams)


def main() -> None:
    """Call the function in this rank and store what it returns."""
    log, rank = Path(sys.argv[1]), os.environ["RANK"]
    name, arguments = pickle.loads(log.with_suffix(".call").read_bytes())
    module, _, function = name.partition(":")
    value = getattr(importlib.import_module(module), function)(*arguments)
    if isinstance(value, int) and value:
        sys.exit(value)
    log.with_suffix(f".{rank}.value").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main()
