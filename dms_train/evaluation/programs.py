"""Run programs that a model wrote, each in a process with limits (`program_process`).

In bubblewrap a program sees Python's own files and its input, all of them read-only. It has no
network, and no process outside is visible. The processes that it starts end with it.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import NamedTuple

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.program_process import NOT_LIMITED

_PROCESS = Path(__file__).with_name("program_process.py")
_WALL = 4  # seconds of wall time per second of processor time, for busy machines
_MEMORY = 2 << 30
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")


class ProgramTest(NamedTuple):
    """Input and expected output.

    Attributes:
        given: Standard input, or the arguments as JSON lines.
        expected: Standard output, or the result as JSON.
        function: Method of `Solution` to call; None for a whole program.
    """

    given: str
    expected: str
    function: str | None = None


def passes(
    source: str, tests: Iterable[ProgramTest], *, seconds: float = 6.0, sandboxed: bool = True
) -> bool:
    """Return whether a program gives every expected output, in a process with limits each.

    Args:
        source: Python.
        tests: Run in order until one fails.
        seconds: Processor time of each.
        sandboxed: Start the processes in bubblewrap.

    Raises:
        EvaluationError: This machine cannot limit or isolate the processes.
    """
    prefix = sandbox() if sandboxed else ()
    return all(_passes(source, test, seconds, prefix) for test in tests)


@functools.cache
def sandbox() -> tuple[str, ...]:
    """Return the words that start a command in bubblewrap, after trying them once.

    Raises:
        EvaluationError: bubblewrap is missing, or the system refuses namespaces to it.
    """
    tool = shutil.which("bwrap")
    problem = "which is not installed; apt-get install bubblewrap"
    if tool is not None:
        words = [tool, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        words += ["--cap-drop", "ALL", "--dev", "/dev", "--remount-ro", "/dev"]
        for path in (*_SYSTEM_FOLDERS, sys.base_prefix, sys.prefix, str(_PROCESS)):
            words += ["--ro-bind-try", path, path]
        trial = [*words, "--remount-ro", "/", "--", sys.executable, "-I", "-c", ""]
        completed = subprocess.run(trial, capture_output=True, text=True, check=False)
        if completed.returncode == 0:
            return tuple(words)
        problem = f"which does not work here ({' '.join(completed.stderr.split())})"
    raise EvaluationError(
        f"programs of a model run in bubblewrap, {problem}; or set allow_code=unisolated in a "
        "container without network and without files of value"
    )


def _passes(source: str, test: ProgramTest, seconds: float, prefix: tuple[str, ...]) -> bool:
    output = _output(source, test, seconds, prefix)
    if output is None:
        return False
    if test.function is None:
        return same_output(output, test.expected)
    try:
        return bool(json.loads(output) == json.loads(test.expected))
    except ValueError:
        return False


def _output(source: str, test: ProgramTest, seconds: float, prefix: tuple[str, ...]) -> str | None:
    """Return what a program writes; None if it fails or exceeds a limit."""
    with tempfile.TemporaryDirectory(prefix="dms-program-") as folder:
        program, given, written = (Path(folder) / name for name in ("source", "in", "out"))
        program.write_text(source, encoding="utf-8", errors="replace")
        given.write_text(test.given, encoding="utf-8")
        words = [sys.executable, "-I", "-B", str(_PROCESS), str(program), str(seconds)]
        words += [str(_MEMORY), *([test.function] if test.function is not None else [])]
        if prefix:
            inner = ["--ro-bind", folder, folder, "--chdir", folder, "--remount-ro", "/", "--"]
            words = [*prefix, *inner, *words]
        with given.open("rb") as stdin, written.open("wb") as stdout:
            process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"LANG": "C.UTF-8"},
            )
            try:
                code = process.wait(_WALL * seconds + 5)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:
                process.kill()
                process.wait()
        if code == NOT_LIMITED:
            raise EvaluationError(
                "programs cannot be limited here; raise the limits of this shell (ulimit -a)"
            )
        return written.read_text(encoding="utf-8", errors="replace") if code == 0 else None


def same_output(output: str, expected: str) -> bool:
    """Compare two outputs line by line, ignoring outer white space and forms of numbers."""
    lines, wanted = ([line.strip() for line in t.strip().split("\n")] for t in (output, expected))
    if len(lines) != len(wanted):
        return False
    return all(a == b or _same_numbers(a, b) for a, b in zip(lines, wanted, strict=True))


def _same_numbers(output: str, expected: str) -> bool:
    try:
        first, second = ([Decimal(word) for word in line.split()] for line in (output, expected))
    except InvalidOperation:
        return False
    return first == second
