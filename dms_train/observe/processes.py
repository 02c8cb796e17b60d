"""Identity and end of processes on one machine. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_ENDED = "ZX"  # proc_pid_stat(5): a zombie, dead
_START_TIME = 19  # index among the fields after the name
_PR_SET_PDEATHSIG = 1  # prctl(2)


def mark(pid: int | None = None) -> str:
    """Return the identity of a process for `has_ended` (None: this one); empty if hidden."""
    try:
        # not getpid: in a container, /proc may hold the numbers of the host
        number = int(os.readlink("/proc/self")) if pid is None else pid
        return f"{_machine()} {number} {_fields(number)[_START_TIME]}"
    except OSError:
        return ""


def has_ended(marked: str) -> bool:
    """Return whether a process of this machine and container is known to have ended."""
    try:
        machine = _machine()
        if not marked.startswith(f"{machine} "):
            return False
    except OSError:
        return False
    pid, start = marked.removeprefix(machine).split()
    try:
        fields = _fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # hidden from this process
        return False
    return fields[0] in _ENDED or fields[_START_TIME] != start


def is_here(marked: str) -> bool:
    """Return whether a process is of this machine and container, so that `has_ended` can tell."""
    try:
        return marked.startswith(f"{_machine()} ")
    except OSError:
        return False


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let Linux signal this process when its parent ends in any way, also while it is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _machine() -> str:
    """Return the name of the space of process numbers: machine and container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
