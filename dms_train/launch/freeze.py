"""Everything that makes a run reproducible: configuration, code, package versions."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import yaml

import dms_train
from dms_train.config.build import to_mapping
from dms_train.config.frozen import CONFIG_FILE
from dms_train.config.schema import RunConfig

_PACKAGE = Path(dms_train.__file__).parent
_WORKDIR = Path("launch") / "workdir.txt"


def freeze(config: RunConfig, command: str) -> None:
    """Fill a run folder, unless it already holds a configuration.

    A job that SLURM requeues hours later runs the copied code, even if the original has changed.
    """
    run = Path(config.run.dir)
    if (run / CONFIG_FILE).is_file():
        return
    (run / _WORKDIR).unlink(missing_ok=True)  # of a submission that was cut short
    for name in ("launch", "logs", "state"):
        (run / name).mkdir(parents=True, exist_ok=True)
    _copy_code(run / "code")
    (run / "launch" / "command.txt").write_text(command + "\n")
    (run / _WORKDIR).write_text(f"{workdir(run)}\n")
    (run / "launch" / "packages.txt").write_text(_packages())
    (run / "launch" / "git.txt").write_text(_git())
    # last: a folder with a configuration is complete
    (run / CONFIG_FILE).write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))


def workdir(run: Path) -> Path:
    """Return the working folder of a run's jobs: that of the first submission."""
    file = run / _WORKDIR
    return Path(file.read_text().removesuffix("\n")) if file.is_file() else Path.cwd()


def _copy_code(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_PACKAGE, target / _PACKAGE.name, ignore=ignored)


def _packages() -> str:
    requirements = {
        f"{package.metadata['Name']}=={package.version}\n"
        for package in importlib.metadata.distributions()
    }
    return "".join(sorted(requirements, key=str.lower))


def _git() -> str:
    """Return commit and uncommitted changes of the code, if it is a git checkout."""
    words = (("rev-parse", "HEAD"), ("status", "--short"), ("diff", "HEAD"))
    outputs = []
    for arguments in words:
        try:
            process = subprocess.run(
                ["git", "-C", str(_PACKAGE), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError):
            return "not a git checkout\n"
        outputs.append(process.stdout)
    return "\n".join(outputs)
