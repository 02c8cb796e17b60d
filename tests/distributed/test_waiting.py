"""What the ranks of one run tell each other, and how long they wait for it."""

from __future__ import annotations

import pytest

from tests.support import launch
from tests.support.waiting_worker import TIMEOUT_SECONDS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def test_the_wait_outlives_the_timeout_of_the_process_group() -> None:
    seconds = str(3 * TIMEOUT_SECONDS)
    launch.checked(launch.torchrun(2, "-m", "tests.support.waiting_worker", seconds))


def test_the_memory_of_a_step_is_that_of_the_fullest_rank() -> None:
    launch.checked(launch.torchrun(2, "-m", "tests.support.memory_worker"))
