"""The ranked channel acts in the engine and is stored with checkpoints and exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.app.channel_choice import candidate_channels, choose_channel, ranks_channels
from dms_train.mcore.checkpoints.state import read_state
from dms_train.method.spec import PRESETS
from dms_train.training.state import TrainState
from tests.support import refusals, tiny
from tests.support.wiring import Assets, Built

UNUSED = 5
TRAINED = TrainState(eviction_enabled=True, target_cr=2.0, channel_scale=0.0)


def test_candidates_hold_no_position_where_rope_rotates_a_part_of_each_head() -> None:
    assert candidate_channels(tiny.architecture("llama")) == [0, 1, 2, -1]
    assert candidate_channels(tiny.architecture("phi3")) == [2, 3, 6, -1]


@pytest.fixture(scope="module")
def model(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output does not depend on channel 5 of the first query heads."""
    folder = tmp_path_factory.mktemp("unused") / "model"
    shutil.copytree(assets.model, folder)
    tensors = load_file(folder / "model.safetensors")
    a = refusals.architecture()
    for name in tensors:
        if "q_proj" in name:
            tensors[name].mul_(20)  # otherwise all channels of random weights matter little
            tensors[name].view(a.num_query_groups, -1, a.kv_channels, a.hidden_size)[
                :, 0, UNUSED
            ] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def chosen(run: Built) -> int:
    choose_channel(run.prepared, run.view, run.engine, run.components.source)
    return run.engine.spec.channel


@pytest.fixture
def auto(built: Callable[..., Built], model: Path) -> Callable[..., Built]:
    """(**changes) -> a run of the model that ranks its channels."""

    def make(**changes: Any) -> Built:
        return built(**{"model.path": str(model), "method.channel": "auto", **changes})

    return make


def test_the_channel_that_the_model_does_not_use_is_chosen(auto: Callable[..., Built]) -> None:
    run = auto()
    assert ranks_channels(run.prepared)
    before = [tensor.clone() for _, tensor in run.engine.hf_tensors()]
    assert chosen(run) == UNUSED
    after = [tensor for _, tensor in run.engine.hf_tensors()]
    assert all(map(torch.equal, before, after))
    assert run.config.method.channel == "auto"  # a resumed run is compared with it


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_the_choice_is_stored_and_a_student_keeps_it(
    auto: Callable[..., Built], tmp_path: Path, kind: str
) -> None:
    run = auto()
    chosen(run)
    if kind == "export":
        export = run.components.exporter.export("final", TRAINED.to_dict())
        student = export / "hf"
        assert json.loads((student / "config.json").read_text())["dms"]["spec"]["channel"] == UNUSED
        assert f"| `channel` | {UNUSED} |" in (student / "README.md").read_text().replace("  ", "")
    else:
        student = tmp_path / "checkpoint"
        state = {**TRAINED.to_dict(), **run.components.saver.provenance}
        run.components.saver.engine.save(student, state)
        assert read_state(student)["spec"]["channel"] == UNUSED
    later = auto(**{"run.load": str(student), "stage.run": ["retrofit", "export"]})
    assert not ranks_channels(later.prepared)
    assert later.prepared.spec.channel == UNUSED
    assert chosen(later) == UNUSED


@pytest.mark.parametrize(
    ("changes", "channel"),
    [
        ({"method.channel": 3}, 3),
        ({"stage.run": ["pretrain"]}, 0),  # no stage uses it
    ],
)
def test_nothing_is_ranked_without_need(
    auto: Callable[..., Built], changes: dict[str, Any], channel: int
) -> None:
    run = auto(**changes)
    assert not ranks_channels(run.prepared)
    assert chosen(run) == channel


def test_dmc_ranks_its_channels_too(auto: Callable[..., Built]) -> None:
    run = auto(method={**asdict(PRESETS["dmc"]), "channel": "auto"})
    assert 0 <= chosen(run) % refusals.architecture().kv_channels < 8
