"""What the launcher (torchrun, or none) states about this process in its environment.

These values are needed before process groups exist.
"""

from __future__ import annotations

import os


def rank() -> int:
    """Rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes that were started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def attempt() -> str | None:
    """Which start of a run this is, as the launch scripts count them; None without them."""
    return os.environ.get("DMS_ATTEMPT")


def job() -> str:
    """SLURM job and number of its restarts, such as `4711.0`; empty outside of SLURM."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"{number}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if number else ""


def api_key() -> str | None:
    """What clients of `dms-serve` must send, unless an argument states it; None for no key."""
    return os.environ.get("DMS_API_KEY") or None
