"""The ranks of a worker, forked after its imports, which take longer than most of its work.

python -m tests.support.forked_workers PROCESSES MODULE ARGUMENTS

Calls `main` of that module in every rank. As with torchrun this process holds the store where they
meet, and ends the others when a rank fails.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from tests.support import launch


def _be_a_rank(rank: int, main: Callable[[], None]) -> None:
    """Never returns."""
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Exit code 0 if all ranks ended with it, or else that of the first that did not."""
    processes, name = int(sys.argv[1]), sys.argv[2]
    called = importlib.import_module(name).main
    sys.argv = sys.argv[2:]
    (port,) = launch.free_ports(1)
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    gc.freeze()  # what was imported stays
    running = set()
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            _be_a_rank(rank, called)
        running.add(pid)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # has threads
    failed = _wait(running)
    del store
    sys.exit(failed)


def _wait(running: set[int]) -> int:
    """Until all have ended, which they must when one fails; the exit code of the first that did."""
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code if code > 0 else 128 - code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    main()
