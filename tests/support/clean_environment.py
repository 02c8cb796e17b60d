"""Virtual environments with the built wheel and the packages of chosen extras, and nothing else.

Packages are linked from the environment of the tests, so that no network and no copy of torch is
needed. pip then installs the wheel with its extras and fails if a requirement is not linked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


class CleanEnvironment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def run(self, *words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment and require its exit code."""
        command, *arguments = map(str, words)
        done = subprocess.run(
            [self.bin / command, *arguments],
            cwd=cwd,
            env=variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


def variables() -> dict[str, str]:
    """Return the variables of a process that imports nothing from this checkout."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of what a checkout holds, without a network."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dms_train", copy / "dms_train", symlinks=True, ignore=ignored)
    _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy))
    (built,) = folder.glob("*.whl")
    return built


def make(folder: Path, wheel: Path, *extras: str) -> CleanEnvironment:
    """Create an environment with the wheel and what it requires with `extras`."""
    venv.create(folder, symlinks=True)
    environment = CleanEnvironment(folder)
    (built,) = metadata.distributions(path=[str(wheel)])
    for name in _closure(built, extras):
        _link(metadata.distribution(name), environment.site)
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    _pip("--python", str(environment.bin / "python"), "install", wanted)
    return environment


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--no-index", "--quiet"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _closure(root: metadata.Distribution, extras: tuple[str, ...]) -> set[str]:
    """Return the names of all distributions that `root` with `extras` requires."""
    found: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        distribution, extra = waiting.pop()
        for item in map(Requirement, distribution.requires or ()):
            if item.marker is not None and not item.marker.evaluate({"extra": extra}):
                continue
            for inner in ("", *item.extras):
                if (item.name, inner) in found:
                    continue
                found.add((item.name, inner))
                waiting.append((_installed(item.name), inner))
    return {name for name, _ in found}


def _installed(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed; `make setup` installs every extra")


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Link every file and folder that the distribution has at the top of site-packages."""
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        link = site / top
        if not link.exists():
            link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
