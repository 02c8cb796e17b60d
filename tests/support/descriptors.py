"""Files and connections that a running process holds open."""

from __future__ import annotations

import contextlib
import os

_STDERR = 2  # standard streams may be sockets


def connections(pid: int) -> list[str]:
    """The sockets and polls of a process beside its standard streams.

    A descriptor that is closed between the listing and its inspection is not counted.
    """
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if int(name) > _STDERR and target.startswith(("socket:", "anon_inode:[eventpoll]")):
                found.append(target)
    return found
