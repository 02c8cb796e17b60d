"""Tuned tiles are measured, stored, read back and used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from dms_train.kernels.train_attention import launch_plan, tuning
from dms_train.kernels.train_attention.launch_plan import TrainTiles, default_plan

CPU = torch.device("cpu")


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tiles.json"
    monkeypatch.setattr(launch_plan, "TUNED_FILE", path)
    launch_plan.clear_cache()
    yield path
    launch_plan.clear_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures through the interpreter")
def test_the_fastest_candidate_is_stored_and_used(tuned_file) -> None:
    trials: list[tuning.Trial] = []
    load = tuning.Load(length=40, heads=2, group=2, window=8)
    best = tuning.tune(torch.float32, 16, CPU, load, seconds=0.0, note=trials.append)
    assert [trial.plan for trial in trials] == [default_plan(torch.float32, 16, CPU)]
    assert best == trials[0]
    other = best.plan._replace(forward=TrainTiles(32, 16, 4, 1))
    tuning.store(tuned_file, launch_plan.family(torch.float32, 16, CPU), other)
    launch_plan.clear_cache()
    assert launch_plan.plan_tiles(torch.float32, 12, CPU).forward == other.forward
    assert launch_plan.plan_tiles(torch.float32, 64, CPU) == default_plan(torch.float32, 64, CPU)
    assert len(json.loads(tuned_file.read_text())) == 1


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_candidates_differ_and_keep_to_what_the_kernels_take(head_size) -> None:
    plan = default_plan(torch.bfloat16, head_size, CPU)
    found = list(tuning.candidates(plan))
    assert found[0] == plan
    assert len(set(found)) == len(found) > 3
    assert all(p.forward.block_m % p.backward.block_m == 0 for p in found)
    by_hand = list(tuning.candidates(plan._replace(hopper=True)))
    assert {p.backward[:3] for p in by_hand} == {plan.backward[:3]}
    assert {p.forward.block_m for p in by_hand} == {plan.forward.block_m}


@pytest.mark.parametrize("forward", [TrainTiles(48, 16, 4, 1), TrainTiles(16, 16, 4, 1)])
def test_stored_tiles_that_do_not_fit_are_not_used(tuned_file, forward) -> None:
    plan = default_plan(torch.float32, 16, CPU)
    family = launch_plan.family(torch.float32, 16, CPU)
    tuning.store(tuned_file, family, plan._replace(forward=forward))
    assert launch_plan.plan_tiles(torch.float32, 16, CPU) == plan


@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', '{"x": [[1, 2], [3]]}', "{"])
def test_a_damaged_file_is_the_same_as_none(tuned_file, text) -> None:
    tuned_file.parent.mkdir()
    tuned_file.write_text(text)
    assert launch_plan.read_tuned(tuned_file) == {}
    assert launch_plan.plan_tiles(torch.float32, 64, CPU) == default_plan(torch.float32, 64, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses where there is no GPU")
def test_the_command_refuses_without_a_gpu() -> None:
    command = [sys.executable, "-m", "dms_train.cli.tune", "128"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "its kernels need a GPU" in done.stderr
