"""All ranks skip a step that is bad on one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import launch
from tests.support import skip_worker as worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("skip")
    launch.checked(launch.workers(worker.PROCESSES, "tests.support.skip_worker", str(out)))
    return out


@pytest.mark.parametrize("layout", worker.NAMES)
def test_all_ranks_agree(folder: Path, layout: str) -> None:
    results = [json.loads((folder / f"{layout}-{rank}.json").read_text()) for rank in range(2)]
    for where in worker.WHERE:
        assert [rank[where]["skipped"] for rank in results] == [True] * 2, where
        assert results[0][where]["changed"] == 0
        assert results[0][where]["finite"] == results[1][where]["finite"]
    assert results[0]["loss"]["finite"] == [False, True]
    assert [rank["None"]["skipped"] for rank in results] == [False] * 2
    assert results[0]["None"]["changed"] > 0


@pytest.mark.parametrize("layout", worker.NAMES)
def test_the_step_after_them_is_that_of_a_run_without_them(folder: Path, layout: str) -> None:
    assert json.loads((folder / f"{layout}-0.json").read_text())["same"]
