"""File systems of a few kilobytes, to be filled."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class CannotArrange(Exception):
    """This machine does not permit what a case needs."""


@contextlib.contextmanager
def small_disk(path: Path, kibibytes: int) -> Iterator[Path]:
    """An empty file system of that size at `path`; CannotArrange without permission."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kibibytes}k"]
    command = ["mount", *options, "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        raise CannotArrange("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
