"""Starts commands by forking a process that has imported the package's dependencies.

Importing torch, megatron and transformers takes longer than most of what tests start. A fork of
the server has its own environment, folder, output, exit code and exit handlers, like a process of
its own. What imports do, what is signalled and how the interpreter frees its modules need a real
start: `launch.python`.

python -m tests.support.fork_server SOCKET answers requests, several at a time. This module is also
what a script on PATH imports to ask for a command (`tests/support/commands.py`), so it imports
little.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "dms_train.app.session",
    "dms_train.cli.config_source",
    "dms_train.app.export_evaluation",
    "dms_train.app.verification",
    "dms_train.inference.llm",
    "transformers.models.llama.modeling_llama",
)


class Started:
    """A process that the server has forked.

    Args:
        address: The server's socket.
        target: `MODULE`, which runs as `python -m MODULE` does, or `MODULE:FUNCTION`, which is
            called as a console script does.
        arguments: Of the command.
        environment: All of it.
        folder: Its working directory.
        streams: File descriptors of its standard input, output and error.
    """

    def __init__(
        self,
        address: str,
        target: str,
        arguments: list[str],
        environment: dict[str, str],
        folder: Path,
        streams: tuple[int, int, int],
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        request = {
            "target": target,
            "arguments": arguments,
            "environment": environment,
            "folder": str(folder),
        }
        text = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(8)], streams)
        self._socket.sendall(text)
        self.pid = int.from_bytes(_read(self._socket, 8))
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutError after that many seconds."""
        self._socket.settimeout(timeout)
        with self._socket:
            return int.from_bytes(_read(self._socket, 8), signed=True)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self._code is None and select.select([self._socket], [], [], 0)[0]:
            self._code = self.wait()
        return self._code


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError("the server of forks has ended")
        content += part
    return content


def main() -> None:
    """Serve until the parent has ended."""
    import gc

    gc.disable()  # until all is imported; passes over it take a second
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # what was imported stays
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{sys.argv[1]}.new")
        listening.listen()
        os.rename(f"{sys.argv[1]}.new", sys.argv[1])  # from now on it answers
        listening.settimeout(10)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
        parent = os.getppid()
        while os.getppid() == parent:
            try:
                connection = listening.accept()[0]
                request, streams = _receive(connection)
            except (OSError, ValueError):  # no request, or a client that closed its end
                continue
            if os.fork() == 0:  # answers this request while the server takes the next
                break
            connection.close()
            for stream in streams:
                os.close(stream)
        else:
            return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        _answer(connection, pid, streams)
        os._exit(0)
    connection.close()
    _become(request, streams)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(None)
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    return json.loads(_read(connection, int.from_bytes(size))), streams


def _answer(connection: socket.socket, pid: int, streams: list[int]) -> None:
    """Send the id of the process and its exit code; kill it when the client closes its end."""
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(8))
    status = None
    while status is None:
        ended, found = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = found
        elif _is_closed(connection):
            for end in (os.killpg, os.kill):  # its group, which it may not have made yet
                with contextlib.suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
    with connection, contextlib.suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, signed=True))


def _is_closed(connection: socket.socket) -> bool:
    """Wait a moment; return True if the other end is closed."""
    connection.settimeout(0.02)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


def _become(request: dict[str, Any], streams: list[int]) -> None:
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        _run(*request["target"].partition(":")[::2], request["arguments"])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _exit(end.code or 0)
    _exit(0)


def _run(module: str, function: str, arguments: list[str]) -> None:
    import runpy

    sys.argv = [module, *arguments]
    if function:
        sys.exit(getattr(importlib.import_module(module), function)())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exit(code: int) -> None:
    """End as the interpreter does, but do not free what was imported, which takes half a second."""
    # joining threads is not enough: those of a pool end when the handlers of `threading` tell them
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
