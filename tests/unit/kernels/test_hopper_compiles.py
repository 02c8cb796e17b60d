"""The kernels for Hopper compile with the Triton that is installed, and fit the GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES = 232448  # of one program on an H100 or H200


@pytest.mark.parametrize(
    ("d", "packed"), [(128, "whole"), pytest.param(64, "packed", marks=pytest.mark.slow)]
)
def test_they_compile_and_use_the_tensor_cores(d: int, packed: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_hopper", str(d), packed]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        shared, products = map(int, line.split())
        assert shared <= SHARED_BYTES
        assert products > 20
    assert len(done.stdout.splitlines()) == 3
