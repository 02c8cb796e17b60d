"""Starts commands in processes of their own, with one CPU thread each."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

import torch

from tests.support.fork_server import ROOT, Started

_SERVERS: list[str] = []  # the address of the one of this process


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


def python(
    *arguments: str, timeout: float = 300, folder: Path = ROOT, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run one Python process in a folder; never raises on its exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**extra),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def fork_server() -> str | None:
    """Address of a process of this one that forks commands; None with GPUs, which forks cannot use.

    It is started once and ends with this process.
    """
    if torch.cuda.is_available():
        return None
    if not _SERVERS:
        address = str(Path(tempfile.mkdtemp(prefix="forks")) / "socket")
        command = [sys.executable, "-m", "tests.support.fork_server", address]
        server = subprocess.Popen(command, env=environment(), cwd=ROOT)
        _SERVERS.append(address)
        atexit.register(_end, server, Path(address).parent)
        while not Path(address).exists():
            assert server.poll() is None, "the server of forks has ended"
            time.sleep(0.02)
    return _SERVERS[0]


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.kill()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def module(
    name: str, *arguments: str, timeout: float = 300, folder: Path = ROOT, **extra: str
) -> subprocess.CompletedProcess[str]:
    """As `python("-m", ...)`, in a fork of a process that has imported torch and megatron already.

    Not for tests of what imports do, which happen before the environment is set.
    """
    address = fork_server()
    if address is None:
        return python("-m", name, *arguments, timeout=timeout, folder=folder, **extra)
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        words = environment(**extra)
        started = Started(address, name, list(arguments), words, folder, streams)
        try:
            code = started.wait(timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(["-m", name, *arguments], timeout) from None
            raise
        texts = [stream.seek(0) or stream.read() for stream in (out, err)]
        return subprocess.CompletedProcess(["-m", name, *arguments], code, *texts)


class Ended(Protocol):
    """A process or ranks that have ended."""

    @property
    def returncode(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


def checked(result: Ended) -> str:
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
