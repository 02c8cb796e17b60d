"""Memory of a process tree, and its extrapolation to larger models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.conversion import anonymous_bytes, extrapolate
from dms_train.hf.directory import SHARD_BYTES

MB, GB = 10**6, 10**9
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


@pytest.mark.parametrize(
    ("peak", "weights", "holds_file", "expected"),
    [
        (3 * GB, 2 * GB, False, 66 * GB),
        (5 * GB, 2 * GB, True, 66 * GB + SHARD_BYTES),  # the file held all weights
        (16 * GB, 10 * GB, True, 71 * GB),
    ],
)
def test_a_whole_model_of_65_gb_adds_what_does_not_grow(
    peak: int, weights: int, holds_file: bool, expected: int
) -> None:
    assert extrapolate(peak, weights, 65 * GB, holds_file) == expected
