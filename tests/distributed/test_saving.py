"""A checkpoint written in the background holds its own step; its writers end with their rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import saving_runs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
CASES: list[dict[str, Any]] = [
    {"name": name, "parallel": parallel, "architecture": {}, "length": 24, "exact": True}
    for name, parallel in (
        ("tp2-fp32", {"tensor_model_parallel_size": 2, "params_dtype": "fp32"}),
        ("dp2-bf16", {"params_dtype": "bf16"}),
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saving")
    saving_runs.run("overlap", 2, CASES, out)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_later_steps_do_not_change_the_checkpoint(folder: Path, case: dict[str, Any]) -> None:
    saving_runs.assert_checkpoints_are_of_their_step(saving_runs.read(folder, case, "overlap"))


def test_writers_end_with_a_killed_rank(tmp_path: Path) -> None:
    saving_runs.kill_during_save(CASES[-1], 2, 1, tmp_path)
