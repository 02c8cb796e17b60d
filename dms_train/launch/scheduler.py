"""Calls of SLURM's commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence


class SchedulerError(ValueError):
    """SLURM is absent, or refused a request."""


def available() -> bool:
    """Return whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def require() -> None:
    """Fail unless SLURM's commands are installed.

    Raises:
        SchedulerError: There is no sbatch.
    """
    if not available():
        raise SchedulerError("sbatch: not found; submit where SLURM is installed")


def submit(script: str, after: str | None) -> str:
    """Submit a batch script that starts when job `after` has succeeded; return the job's id.

    Raises:
        SchedulerError: SLURM refused it.
    """
    words = ["sbatch", "--parsable"]
    if after is not None:
        # without the second option a stage would wait forever if its predecessor failed
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return _run(words, script).strip().partition(";")[0]


def test(script: str) -> str:
    """Ask SLURM about a script without running it; return the expected start or the error."""
    try:
        process = subprocess.run(
            ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"sbatch: {error.strerror}"
    lines = (process.stderr or process.stdout).strip().splitlines()
    return lines[-1] if lines else f"sbatch --test-only: exit code {process.returncode}"


def states(jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of the jobs that are in SLURM's queue."""
    wanted = set(jobs)
    if not wanted or not available():
        return {}
    # jobs of all users, because another user may have submitted a shared run folder
    lines = _run(["squeue", "--all", "--noheader", "--format=%A %T %r"], "").splitlines()
    known = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}
    return {job: state for job, state in known.items() if job in wanted}


def ended_as(job: str) -> str | None:
    """Return the state of a job that has ended; None when SLURM has no record of it."""
    try:
        described = _run(["scontrol", "show", "job", "-o", job], "")
    except SchedulerError:
        return None
    words = (word.partition("=") for word in described.split())
    return next((value for name, _, value in words if name == "JobState"), None)


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs that are in the queue."""
    ids = list(jobs)
    if ids:
        _run(["scancel", *ids], "")


def _run(words: Sequence[str], text: str) -> str:
    try:
        process = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise SchedulerError(f"{words[0]}: not found; submit where SLURM is installed") from error
    except subprocess.CalledProcessError as error:
        text = " ".join(error.stderr.split()).removeprefix(f"{words[0]}: ")
        raise SchedulerError(f"{words[0]}: {text or error.returncode}") from error
    return process.stdout
