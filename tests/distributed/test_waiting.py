"""Waiting ranks: time limits, warnings and shared refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import launch
from tests.support.waiting_worker import TIMEOUT_SECONDS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def test_a_wait_for_rank_0_may_exceed_the_timeout_of_the_process_group() -> None:
    seconds = str(3 * TIMEOUT_SECONDS)
    launch.checked(launch.workers(2, "tests.support.waiting_worker", seconds))


def test_a_slow_rank_is_not_a_stalled_rank(tmp_path: Path) -> None:
    result = launch.workers(2, "tests.support.stuck_worker", "patient", str(tmp_path))
    launch.checked(result)
    (message,) = re.findall("warning: rank 1 has waited .*$", result.stderr, re.MULTILINE)
    assert re.search(r"; rank 0 \(\S+, after step 0\) is at \S+:\d+ in ", message)


def test_ranks_that_wait_for_each_other_report_where(tmp_path: Path) -> None:
    result = launch.workers(2, "tests.support.stuck_worker", "deadlock", str(tmp_path))
    assert result.returncode != 0
    message = re.findall("^error: .*$", result.stderr, re.MULTILINE)
    assert re.search(
        r"all ranks wait for each other, or for their GPUs, for more than 6 s: ranks 0-1 at "
        r"torch/distributed/distributed_c10d.py:\d+ in barrier; stacks in ",
        message[0],
    )


@pytest.mark.parametrize(
    ("failure", "code", "message"), [("refusal", 2, "config error"), ("bug", 1, "TypeError")]
)
def test_a_rank_that_fails_waits_for_no_collective(failure: str, code: int, message: str) -> None:
    result = launch.torchrun(2, "-m", "tests.support.failing_worker", failure, timeout=120)
    assert result.returncode != 0
    assert f"{message}: rank 0 has a reason" in result.stderr
    assert f"exitcode  : {code} " in result.stderr


def test_all_ranks_refuse_a_run_that_does_not_fit_one_gpu() -> None:
    result = launch.torchrun(2, "-m", "tests.support.unequal_worker", "20")
    assert result.returncode != 0
    # rank 1 prints it as well where the launcher takes long to end it
    message, *_ = re.findall("^.*error: .*$", result.stderr, re.MULTILINE)
    assert message.startswith("config error: rank 1 has a NVIDIA A100 with 20.0 GiB: parallel: ")
    assert "more than the 20.0 GiB of a NVIDIA A100" in message


def test_different_gpus_that_fit_the_run_are_accepted() -> None:
    launch.checked(launch.workers(2, "tests.support.unequal_worker", "79"))


def test_the_memory_of_a_step_is_that_of_the_fullest_rank() -> None:
    launch.checked(launch.workers(2, "tests.support.memory_worker"))
