"""A resume compares the constants of the method with those that the checkpoint was trained with."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.metadata import Metadata

from dms_train.app.run_folder import resume_point
from dms_train.app.start_point import StartPoint
from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.frozen import CONFIG_FILE
from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints import state as checkpoint_state
from dms_train.training.state import TrainState
from tests.support import configs

TRAINED: dict[str, Any] = {"method__window": 16, "method__clear_after_rope": False}
START = StartPoint(
    architecture=configs.architecture(), model_dir=None, tokenizer_dir=None, state=TrainState()
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint, and without the configuration that was used."""
    folder = tmp_path / "checkpoints" / "step_00000007"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    common = io.BytesIO()
    torch.save({}, common)
    (folder / "common.pt").write_bytes(common.getvalue())
    state = {
        **TrainState(step=7).to_dict(),
        "spec": configs.config(**TRAINED).method.to_dict(),
        "architecture": asdict(configs.architecture()),
    }
    checkpoint_state.seal(folder, state, checksums.records(folder.iterdir()))
    return tmp_path


def test_the_same_method_resumes(run: Path) -> None:
    found = resume_point(configs.config(run__dir=str(run), **TRAINED), START)
    assert found is not None
    assert (found.state.step, found.resumes) == (7, True)


def test_each_changed_constant_is_one_line_with_both_values_and_the_fix(run: Path) -> None:
    changed = {**TRAINED, "method__window": 8, "method__clear_after_rope": True}
    with pytest.raises(ConfigError) as refused:
        resume_point(configs.config(run__dir=str(run), **changed), START)
    window, clear = sorted(refused.value.problems, reverse=True)
    for line, facts in (
        (window, ("method.window=8:", "with 16", "write method.window=16")),
        (clear, ("method.clear_after_rope=true:", "with false", "method.clear_after_rope=false")),
    ):
        assert all(fact in line for fact in facts), line
        assert "step_00000007" in line


def test_a_resumed_run_keeps_the_channel_of_its_checkpoint(run: Path) -> None:
    chosen = configs.config(run__dir=str(run), **TRAINED, method__channel="auto")
    file = run / CONFIG_FILE
    file.write_text(yaml.safe_dump(to_mapping(configs.config(run__dir=str(run), **TRAINED))))
    found = resume_point(chosen, START)
    assert found is not None
    assert found.spec is not None
    assert found.spec.channel == 0
    other = configs.config(run__dir=str(run), **TRAINED, method__channel=3)
    with pytest.raises(ConfigError, match=r"method\.channel=3: .*trained with 0; write method"):
        resume_point(other, START)
