"""Starts real multi-process runs: torchrun on this machine, one CPU thread a process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the repository importable and one thread a process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WANDB_MODE": "offline",
        **extra,
    }


def python(*arguments: str, timeout: float = 300, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one Python process; never raises on its exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def torchrun(
    processes: int, *arguments: str, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `arguments` in that many ranks; one process is started plainly."""
    if processes == 1:
        return python(*arguments, timeout=timeout, **extra)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return python(*launcher, *arguments, timeout=timeout, **extra)


def workers(
    processes: int, module: str, *arguments: str, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Call `main` of a module in that many ranks, without a launcher.

    They are forked from one process, unless there are GPUs, which forks cannot use.
    """
    if processes == 1 or torch.cuda.is_available():
        return torchrun(processes, "-m", module, *arguments, timeout=timeout, **extra)
    words = ("tests.support.forked_workers", str(processes), module)
    return python("-m", *words, *arguments, timeout=timeout, **extra)


def checked(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a run that must have succeeded."""
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing uses, all different.

    They lie below those that the kernel gives to connections, of other tests for example.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 10000 and 32768")
