"""Facts about this process that the launcher (torchrun, or none) states in its environment.

These values are needed before process groups exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that were started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_per_host() -> int | None:
    """Return the number of processes that torchrun started on this host; None without it."""
    count = os.environ.get("LOCAL_WORLD_SIZE")
    return None if count is None else int(count)


def attempt() -> str | None:
    """Return the number of this start of the run; None without the launch scripts."""
    return os.environ.get("DMS_ATTEMPT")


def job() -> str:
    """Return the SLURM job and its number of restarts, such as `4711.0`; empty outside SLURM."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"{number}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if number else ""


def variables() -> Mapping[str, str]:
    """Return all environment variables of this process."""
    return os.environ


def api_key() -> str | None:
    """Return the key that clients of `dms-serve` must send; None if there is none."""
    return os.environ.get("DMS_API_KEY") or None


def hide_gpus() -> None:
    """Keep this process off the GPUs; without effect once it has asked CUDA for them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def client_key() -> str | None:
    """Return the key that requests to a server with OpenAI's API carry."""
    return os.environ.get("OPENAI_API_KEY") or None
