"""A finished run is continued to a higher ratio by `run.load` and a new target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dms_train.app import run_folder
from dms_train.config.build import ConfigError
from dms_train.hf.formats import read_spec, read_target_cr
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.training import loop
from tests.support.wiring import Built

FIRST = {"stage.run": ["zero_neuron", "retrofit", "export"], "stage.retrofit.target_cr": 2}
INFERENCE = StepPlan(eviction="hard", channel_scale=0.0, target_cr=2.0)


def finish(run: Built) -> Path:
    """Run all stages; the final export."""
    run_folder.write(run.config, is_main_rank=True)
    loop.run(run.prepared.stages, replace(run.prepared.start.state), run.components)
    return run.prepared.folder / "exports" / "final" / "hf"


@pytest.fixture
def continued(built: Callable[..., Built]) -> tuple[Built, Path, Callable[..., Built]]:
    """A finished run, its export, and (**changes) -> a run that goes on from its folder to CR 4."""
    first = built(**FIRST)
    export = finish(first)
    load: dict[str, Any] = {
        "run.load": str(first.prepared.folder),
        "stage.run": ["retrofit", "export"],
        "stage.retrofit.target_cr": 4,
    }
    return first, export, lambda **changes: built(**{**load, **changes})


def test_the_ratio_and_the_weights_go_on_where_the_first_run_ended(
    continued: tuple[Built, Path, Callable[..., Built]], caplog: pytest.LogCaptureFixture
) -> None:
    first, export, further = continued
    with caplog.at_level("INFO"):
        run = further()
        assert run.prepared.start.student is not None
    assert "step_00000004: its compression ratio is 2" in caplog.text
    before = dict(run.engine.hf_tensors())
    stored = load_file(export / "model.safetensors")
    assert all(torch.equal(before[name], stored[name]) for name in stored)
    kl = [each.engine.evaluate(INFERENCE, run.batches).terms["kl"] for each in (first, run)]
    assert kl[0] == kl[1] > 0
    plans = [plan for plan, _ in run.recorded.of("train")]
    assert [plan.target_cr for plan in plans] == [2.5, 3.0, 3.5, 4.0]
    assert {(plan.channel_scale, plan.eviction) for plan in plans} == {(0.0, "soft")}
    assert run.recorded.of("reset_channel") == []


def test_the_export_states_the_new_ratio_and_the_same_method(
    continued: tuple[Built, Path, Callable[..., Built]],
) -> None:
    _, export, further = continued
    run = further()
    final = finish(run)
    assert (read_target_cr(export), read_target_cr(final)) == (2.0, 4.0)
    assert read_spec(final) == read_spec(export)
    lines = (run.prepared.folder / "metrics.jsonl").read_text().splitlines()
    trained = [row for row in map(json.loads, lines) if "train/target_cr" in row]
    assert [row["train/target_cr"] for row in trained] == [2.5, 3.0, 3.5, 4.0]


def test_another_method_or_a_lower_target_is_refused_in_one_line(
    continued: tuple[Built, Path, Callable[..., Built]],
) -> None:
    _, _, further = continued
    cases = {
        "other constants; add method.window=4": {"method.window": 8},
        "other constants; add method.channel=0": {"method.channel": 3},
        "trained with method=dms; add that": {"method": asdict(PRESETS["dmc"])},
        "ratio 2 is above stage.retrofit.target_cr=1.5; anneal upwards": {
            "stage.retrofit.target_cr": 1.5
        },
        "leave zero_neuron and pretrain out of stage.run": {"stage.run": ["zero_neuron"]},
    }
    for line, changes in cases.items():
        with pytest.raises(ConfigError) as refused:
            _ = further(**changes).prepared
        (problem,) = refused.value.problems
        assert line in problem
