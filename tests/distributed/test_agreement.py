"""All ranks continue from one checkpoint, also when one of them cannot read the newest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import agreement_worker as worker
from tests.support import launch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs, after two ranks looked where to continue them."""
    out = tmp_path_factory.mktemp("agreement")
    arguments = ("tests.support.agreement_worker", str(out))
    launch.checked(launch.workers(worker.PROCESSES, *arguments, timeout=120))
    return out


@pytest.fixture(scope="module")
def outcomes(out: Path) -> list[dict[str, str]]:
    """What each rank did in every case."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(worker.PROCESSES)]


@pytest.mark.parametrize(
    ("case", "where"),
    [
        ("content", "step_00000005, step 5"),
        ("state", "step_00000005, step 5"),
        ("from_the_beginning", "step_00000003, step 3"),
    ],
)
def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(
    outcomes: list[dict[str, str]], case: str, where: str
) -> None:
    assert [ranks[case] for ranks in outcomes] == [where] * worker.PROCESSES


def test_checkpoints_that_were_passed_over_are_renamed_and_refused_ones_stay(out: Path) -> None:
    left = {
        case: {path.name for path in (out / case / "checkpoints").iterdir()}
        for case in worker.CASES
    }
    whole = [f"step_{step:08d}" for step in worker.STEPS]
    aside = [f"{name}.damaged" for name in whole]
    assert left["content"] == left["state"] == {whole[0], whole[1], aside[2]}
    assert left["from_the_beginning"] == {whole[0], aside[1], aside[2]}
    assert left["no_older_one"] == left["another_folder"] == set(whole)


def test_all_ranks_refuse_when_one_sees_another_folder(outcomes: list[dict[str, str]]) -> None:
    (reason,) = {ranks["another_folder"] for ranks in outcomes}
    assert "rank 1: sees None as the place to start from" in reason


def test_all_ranks_refuse_when_one_has_no_checkpoint_left(outcomes: list[dict[str, str]]) -> None:
    (reason,) = {ranks["no_older_one"] for ranks in outcomes}
    assert "none of its 2 checkpoint(s) can be used" in reason
    assert "cannot be read (Input/output error)" in reason
