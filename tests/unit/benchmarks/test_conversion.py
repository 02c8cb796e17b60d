"""Memory of a process and its children."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.conversion import anonymous_bytes

MB = 10**6
CHILD = """
import os, sys
held = bytearray(b"x") * 100_000_000
if os.fork() == 0:  # shares the pages above
    own = bytearray(b"y") * 50_000_000
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def test_pages_that_processes_share_count_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        measured = anonymous_bytes(process.pid)
        process.stdin.close()
    assert 150 * MB < measured < 190 * MB
    assert anonymous_bytes(process.pid) == 0
