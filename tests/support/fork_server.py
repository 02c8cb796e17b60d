"""Starts `python -m MODULE` by forking a process that has imported the package's dependencies.

Importing torch, megatron and transformers takes longer than most of what tests start. A fork of
the server has its own environment, output, exit code and end of the interpreter, like a process
of its own. What imports do, and what is signalled or killed, needs a real start: `launch.python`.

python -m tests.support.fork_server reads requests as lines of JSON. For each it writes the id of
the process, and its exit code when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "dms_train.app.session",
    "dms_train.app.export_evaluation",
    "dms_train.app.verification",
    "transformers.models.llama.modeling_llama",
)


class ForkServer:
    """The client's side; one request at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment = environment

    def run(
        self, module: str, *arguments: str, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `python -m MODULE ARGUMENTS`, with the output as text.

        Raises:
            subprocess.TimeoutExpired: It still ran after `timeout` seconds, and was killed.
        """
        command = ["-m", module, *arguments]
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "stdout", Path(folder) / "stderr"
            words = {"module": module, "arguments": arguments, "environment": environment}
            code = self._ask({**words, "stdout": str(out), "stderr": str(err)}, command, timeout)
            return subprocess.CompletedProcess(
                command, code, out.read_text(errors="replace"), err.read_text(errors="replace")
            )

    def _ask(self, request: dict[str, Any], command: list[str], timeout: float) -> int:
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        started = 0
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            started = int(server.stdout.readline())
            if not select.select([server.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(command, timeout)
            return int(server.stdout.readline())
        except BaseException:  # an answer that nobody waits for would be taken for the next one's
            if started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started, signal.SIGKILL)
            self.stop()
            raise

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server"],
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.stop)
        return self._process

    def stop(self) -> None:
        """End the server; the next request starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            atexit.unregister(self.stop)


def main() -> None:
    """Serve until the input ends. A fork returns from here, and the interpreter ends as usual."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported stays
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _become(request, answers)
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


def _become(request: dict[str, Any], answers: IO[str]) -> None:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    answers.close()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
