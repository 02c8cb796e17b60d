"""A run that was saved and loaded again is the run that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import resume_runs
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
# Largest relative difference of a loss, and of a weight, after half of the run in another layout.
BARS = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 1e-1)}
Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume")
    values_of_ranks(resume_runs.work, resume_runs.PROCESSES, out)
    return out


def read(folder: Path, name: str) -> tuple[Rows, dict[str, Tensor]]:
    return json.loads((folder / f"{name}.json").read_text()), load_file(
        folder / f"{name}.safetensors"
    )


@pytest.mark.parametrize(("layout", "dtype"), resume_runs.SAME)
def test_a_save_changes_nothing(folder: Path, layout: str, dtype: str) -> None:
    rows, weights = read(folder, f"{layout}-{dtype}-whole")
    saved_rows, saved = read(folder, f"{layout}-{dtype}-saved")
    assert len(rows) == resume_runs.STEPS
    assert saved_rows == rows
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("how", ["resumed", "returned"])  # "returned": in the same engine
@pytest.mark.parametrize(("layout", "dtype"), resume_runs.SAME)
def test_a_resumed_run_is_bit_identical(folder: Path, layout: str, dtype: str, how: str) -> None:
    rows, weights = read(folder, f"{layout}-{dtype}-whole")
    resumed_rows, resumed = read(folder, f"{layout}-{dtype}-{how}")
    print(f"{layout} {dtype}: losses {[round(row['loss'], 6) for row in rows]}")
    assert resumed_rows == rows[resume_runs.HALF :]
    assert resumed.keys() == weights.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


def test_losses_fall_and_learning_rates_change(folder: Path) -> None:
    for layout, dtype in resume_runs.SAME:
        rows, _ = read(folder, f"{layout}-{dtype}-whole")
        assert len({row["lr"] for row in rows}) == resume_runs.STEPS
        assert len({row["loss"] for row in rows}) == resume_runs.STEPS
        assert all(0.05 < row["alpha"] < 0.95 for row in rows)


@pytest.mark.parametrize(("source", "layout", "dtype"), resume_runs.OTHER)
def test_another_layout_continues_the_same_run(
    folder: Path, source: str, layout: str, dtype: str
) -> None:
    rows, weights = read(folder, f"{source}-{dtype}-whole")
    other_rows, other = read(folder, f"{source}-to-{layout}-{dtype}")
    worst = max(
        abs(b["loss"] - a["loss"]) / abs(a["loss"])
        for a, b in zip(rows[resume_runs.HALF :], other_rows, strict=True)
    )
    moved = max(((other[n] - w).norm() / w.norm()).item() for n, w in weights.items())
    print(f"{source} -> {layout} {dtype}: loss {worst:.1e}, weights {moved:.1e}")
    loss_bar, weight_bar = BARS[dtype]
    assert worst < loss_bar
    assert moved < weight_bar
