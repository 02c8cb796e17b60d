"""Engines in separate processes that print their measurements."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks.records import ROOT


def printed_rows(words: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows that a command prints, one JSON line each, without waiting for its end.

    Other lines are left out.

    Args:
        words: The command.

    Raises:
        CalledProcessError: The command failed, after its last row.
    """
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"engine"'):
                yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
