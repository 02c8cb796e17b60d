"""The fault campaign, which `make test-faults` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import campaign


def results_of(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    assert campaign.main([str(out), *arguments]) == 0
    return json.loads((out / "results.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.faults
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_kill_does_not_change_the_loss_curve(tmp_path: Path) -> None:
    arguments = ("--kills", "1", "--in-save", "1", "--only", "ranks killed", "--stage-steps", "4")
    killed = results_of(tmp_path, *arguments)["ranks killed"]
    assert killed["faults"] == 1
    assert killed["difference"] == 0.0


@pytest.mark.faults
@pytest.mark.timeout(5400)
def test_the_whole_campaign(tmp_path: Path) -> None:
    results = results_of(tmp_path, "--kills", "20", "--in-save", "7")
    killed = results["ranks killed"]
    assert killed["faults"] == 20
    assert killed["during_a_save"] >= 5
    for name in ("newest checkpoint cut off", "newest checkpoint, one bit flipped"):
        assert results[name]["warned"], name
    if "disk full for 15 steps" in results:  # filling a disk needs root
        disk = results["disk full for 15 steps"]
        assert disk["faults"] >= 1
        assert disk["finished"]
    assert results["a rank whose disk does not answer"]["named"] == "rank 2, after step 32"
    assert results["NaN gradients on one rank, and a kill"]["skipped"] == [24, 31]
    assert {
        name for name, result in results.items() if result["difference"] > campaign.BAR
    } == set()
