"""Starts real multi-process runs: torchrun on this machine, one CPU thread a process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys

import torch

from tests.support.fork_server import ROOT, ForkServer

_SERVERS: list[ForkServer] = []  # the one of this process


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


def module(
    name: str, *arguments: str, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """As `python("-m", ...)`, in a process that has imported torch and megatron already.

    Not for tests of what imports do, nor with GPUs, which forks cannot use.
    """
    if torch.cuda.is_available():
        return python("-m", name, *arguments, timeout=timeout, **extra)
    if not _SERVERS:
        _SERVERS.append(ForkServer(environment()))
    words = environment(**extra)
    return _SERVERS[0].run(name, *arguments, environment=words, timeout=timeout)


def torchrun(
    processes: int, *arguments: str, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `arguments` in that many ranks; one process is started plainly."""
    if processes == 1:
        return python(*arguments, timeout=timeout, **extra)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return python(*launcher, *arguments, timeout=timeout, **extra)


def workers(
    processes: int, name: str, *arguments: str, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Call `main` of a module in that many ranks, without a launcher.

    They are forked from one process, unless there are GPUs, which forks cannot use.
    """
    if torch.cuda.is_available():
        return torchrun(processes, "-m", name, *arguments, timeout=timeout, **extra)
    words = ("tests.support.forked_workers", str(processes)) if processes > 1 else ()
    return module(*words, name, *arguments, timeout=timeout, **extra)


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
