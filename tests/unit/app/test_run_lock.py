"""A run folder is written by one run at a time."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.app import run_folder, session
from dms_train.app.start_point import StartPoint
from dms_train.config.build import ConfigError, build
from dms_train.config.resolve import resolved
from dms_train.launch import stage
from dms_train.observe.locks import LockedError, held
from dms_train.observe.state_files import StateFiles
from dms_train.training.state import TrainState
from tests.support import configs, refusals, wiring

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, ready: Any, done: Any) -> None:
    with held(StateFiles(folder).lock, "first"):
        ready.set()
        done.wait(120)


@pytest.fixture
def used(tmp_path: Path) -> Any:
    """A run folder in which another process writes metrics."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 9, "train/loss": 1.0}) + "\n")
    ready, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(folder, ready, done))
    process.start()
    assert ready.wait(60)
    yield folder, process.pid
    done.set()
    process.join(60)


def test_a_second_run_is_refused_and_changes_nothing(used: Any, tmp_path: Path) -> None:
    folder, pid = used
    assets = wiring.make_assets(tmp_path)
    config = resolved(
        build(
            configs.mapping(
                model__path=str(assets.model),
                data__paths=[assets.data],
                data__seq_length=32,
                method__window=4,
                run__dir=str(folder),
            )
        )
    )
    before = refusals.listing(folder)
    with pytest.raises(LockedError, match=rf"^run.dir={folder}: already in use by process {pid} "):
        session.run(config)
    assert refusals.listing(folder) == before


def test_a_job_that_trains_nothing_is_refused_too(
    used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pid = used
    monkeypatch.setattr(stage, "read_frozen", lambda path: None)
    monkeypatch.setitem(stage._STAGES, "validate_export", lambda config: pytest.fail("it ran"))
    with pytest.raises(LockedError, match=rf"process {pid} "):
        stage.run(folder, "validate_export")


def test_a_stage_of_a_locked_folder_may_be_tried_again(used: Any) -> None:
    """The mark of a refusal would end the chain of jobs, although the lock may become stale."""
    folder, _ = used
    config = configs.mapping(run__dir=str(folder))
    (folder / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(LockedError):
        stage.run(folder, stage.VALIDATE_EXPORT)
    assert not list(folder.rglob("REFUSED"))
    assert not list(folder.rglob("*rank0.json"))


def test_a_checkpoint_that_appears_before_the_lock_is_noticed(tmp_path: Path) -> None:
    config = resolved(build(configs.mapping(run__dir=str(tmp_path))))
    start = StartPoint(
        architecture=configs.architecture(),
        model_dir=None,
        tokenizer_dir=None,
        state=TrainState(),
    )
    run_folder.require_unchanged(config, start)
    found = tmp_path / "checkpoints" / "step_00000004"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.checkpoint, "newest", lambda _: (found, []))
        with pytest.raises(ConfigError, match="another run wrote to it"):
            run_folder.require_unchanged(config, start)
        run_folder.require_unchanged(config, replace(start, student=found, resumes=True))
