"""The console scripts of this working tree, as files for PATH."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_commands(folder: Path) -> Path:
    """One executable for each console script of pyproject.toml, whatever is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder.mkdir(parents=True)
    for name, target in project["scripts"].items():
        module, _, function = target.partition(":")
        file = folder / name
        file.write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
            f"if __name__ == '__main__':\n"  # not in a process that it spawns
            f"    sys.argv[0] = {name!r}\n    sys.exit({function}())\n"
        )
        file.chmod(0o755)
    return folder
