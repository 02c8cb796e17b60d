"""Programs that a model wrote, each run in a process with limits (`program_process`)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import NamedTuple

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.program_process import NOT_ISOLATED

_PROCESS = Path(__file__).with_name("program_process.py")
_WALL = 4  # seconds of wall time for one of processor time, for busy machines
_MEMORY = 2 << 30


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


def passes(source: str, tests: Iterable[ProgramTest], *, seconds: float = 6.0) -> bool:
    """Return whether a program gives every expected output, each in a process with limits.

    Args:
        source: Python.
        tests: Run in order until one fails.
        seconds: Processor time of each.

    Raises:
        EvaluationError: This machine cannot limit the processes.
    """
    return all(_passes(source, test, seconds) for test in tests)


def _passes(source: str, test: ProgramTest, seconds: float) -> bool:
    output = _output(source, test, seconds)
    if output is None:
        return False
    if test.function is None:
        return same_output(output, test.expected)
    try:
        return bool(json.loads(output) == json.loads(test.expected))
    except ValueError:
        return False


def _output(source: str, test: ProgramTest, seconds: float) -> str | None:
    """Return the output of a program; None if it fails or exceeds a limit."""
    with tempfile.TemporaryDirectory(prefix="dms-program-") as folder:
        program, given, written = (Path(folder) / name for name in ("source", "in", "out"))
        program.write_text(source, encoding="utf-8", errors="replace")
        given.write_text(test.given, encoding="utf-8")
        words = [sys.executable, "-I", "-B", str(_PROCESS), str(program), str(seconds)]
        words += [str(_MEMORY), *([test.function] if test.function is not None else [])]
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
        if code == NOT_ISOLATED:
            raise EvaluationError(
                "programs cannot be isolated here; Linux on x86-64 with seccomp is needed"
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
