"""Requirements of a stage on a node, and a check of the node."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_LEAVE_OUT = "have it repaired, or leave it out (--exclude=NODE in cluster.options)"


class NodeError(ValueError):
    """The node does not meet the requirements."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements on every node of a job.

    Attributes:
        gpus: Least number of visible GPUs; 0 skips the check.
        checkpoint_bytes: Bytes in the run folder, free or taken by its checkpoints.
        kept_bytes: Bytes in the run folder, free or taken by its weights and exports.
    """

    gpus: int
    checkpoint_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        wanted = []
        if self.gpus:
            wanted.append(f"{self.gpus} visible GPU(s)")
        needed = self.checkpoint_bytes + self.kept_bytes
        if needed:
            wanted.append(f"{_size(needed)} in the run folder")
        return " and ".join(wanted) or "nothing"


def look(run: Path, needs: Needs, visible: str | None = None) -> str:
    """Describe the node in one line.

    Args:
        run: Run folder.
        needs: Requirements.
        visible: CUDA_VISIBLE_DEVICES; None when it is not set.

    Raises:
        NodeError: The node has less than `needs`.
    """
    resources = []
    if needs.gpus:
        gpus = _visible_gpus(visible)
        if gpus < needs.gpus:
            raise NodeError(f"{gpus} visible GPU(s), {needs.gpus} are needed; {_LEAVE_OUT}")
        resources.append(f"{gpus} visible GPU(s)")
    free = shutil.disk_usage(run).free
    missing = _missing(run, needs)
    if free < missing:
        raise NodeError(
            f"{_size(free)} free in {run}, {_size(missing)} are needed for what the run still "
            "writes; free disk space, or lower run.keep_checkpoints"
        )
    resources.append(f"{_size(free)} free in {run}")
    return f"has {', '.join(resources)}; needs {needs}"


def _missing(run: Path, needs: Needs) -> int:
    """Return the bytes that the run still writes, with a margin."""
    # damaged checkpoints are never deleted, so new ones do not take their space
    whole = [path for path in run.glob("checkpoints/*") if ".damaged" not in path.name]
    checkpoints = max(0, needs.checkpoint_bytes - _taken(whole))
    kept = max(0, needs.kept_bytes - _taken([run / "weights", run / "exports"]))
    return (checkpoints + kept) * 11 // 10  # 10 % for the index and padded rows of the vocabulary


def _taken(folders: list[Path]) -> int:
    files = (file for folder in folders for file in folder.rglob("*"))
    return sum(file.lstat().st_size for file in files)


def _visible_gpus(visible: str | None) -> int:
    """Return the number of GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows."""
    try:
        process = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=120, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NodeError(f"nvidia-smi does not answer ({_reason(error)}); {_LEAVE_OUT}") from error
    listed = sum(line.startswith("GPU ") for line in process.stdout.splitlines())
    return listed if visible is None else min(listed, len([v for v in visible.split(",") if v]))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        text = " ".join((error.stderr or error.stdout).split())
        return text or f"exit code {error.returncode}"
    return getattr(error, "strerror", None) or "no answer in 120 s"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
