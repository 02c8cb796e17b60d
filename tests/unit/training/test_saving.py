"""Checkpoints that are waited for, kept, deleted and required, with a slow engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import NoProgress
from dms_train.training import saving
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Removals, Saver, remove_old
from dms_train.training.state import TrainState


class SlowEngine:
    """Completes a background save at the second poll, or when it is waited for."""

    def __init__(self) -> None:
        self.pending: tuple[Path, dict[str, Any]] | None = None
        self.polls = 0
        self.full = False  # the disk

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        assert self.pending is None, "two saves at once"
        path.with_name(path.name + ".1f.partial").mkdir(parents=True)
        self.pending, self.polls = (path, state), 0
        if wait:
            self.finish_save(wait=True)

    def finish_save(self, *, wait: bool) -> Path | None:
        self.polls += 1
        if self.pending is None or not (wait or self.polls > 1):
            return None
        (path, state), self.pending = self.pending, None
        if self.full:
            path.with_name(path.name + ".1f.partial").rmdir()
            raise ValueError(f"checkpoint {path}: cannot be written (full): make room")
        path.with_name(path.name + ".1f.partial").rename(path)
        (path / "run_state.json").write_text(json.dumps(state))
        return path


class Rows:
    """A sink."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.rows.append((step, values))

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


class Workspace:
    """A saver with its engine and sink."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine, self.rows, self.folder = SlowEngine(), Rows(), folder
        reporter = Reporter(
            sinks=[self.rows],  # type: ignore[list-item]
            progress=NoProgress(),
            tokens_per_step=1,
            log_interval=1,
            throughput=Throughput(),
            means=Means(),
            compute=Compute(forward_flops=1.0, student_flops=3.0, devices=1),
        )
        self.saver = Saver(
            engine=self.engine,  # type: ignore[arg-type]
            reporter=reporter,
            options=RunOptions(dir="unused", keep_checkpoints=2, **options),
            folder=folder,
            is_main_rank=True,
            provenance={},
        )

    def save(self, step: int, kept: int | None = None, **how: bool) -> None:
        self.saver.save(TrainState(step=step, kept_step=kept), **{"required": False, **how})

    def unfinished(self) -> list[str]:
        """Return what is left when everything is deleted."""
        self.saver._removals.wait(60)
        return [path.name for path in self.folder.glob("*.partial")]

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_????????"))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_training_continues_until_a_poll_finds_the_checkpoint_complete(
    workspace: Workspace,
) -> None:
    workspace.save(4)
    assert workspace.steps == []
    workspace.saver.poll(5)
    assert workspace.steps == []
    workspace.saver.poll(6)
    assert workspace.steps == [4]
    assert [step for step, _ in workspace.rows.of("train/checkpoint_seconds")] == [6]


def test_a_save_waits_for_the_one_before(workspace: Workspace) -> None:
    workspace.save(4)
    workspace.save(5)
    assert workspace.steps == [4]
    workspace.saver.finish_pending_save(5)
    assert workspace.steps == [4, 5]


@pytest.mark.parametrize("how", ["required", "wait"])
def test_a_required_checkpoint_is_complete_at_once(workspace: Workspace, how: str) -> None:
    workspace.save(4)
    workspace.save(5, **{how: True})
    assert workspace.steps == [4, 5]
    assert workspace.engine.pending is None


def test_without_async_save_every_checkpoint_is_waited_for(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, async_save=False)
    workspace.save(4)
    assert workspace.steps == [4]


def test_old_ones_are_removed_only_when_a_new_one_is_complete(workspace: Workspace) -> None:
    workspace.save(1, kept=1, wait=True)
    for step in (2, 3, 4):
        workspace.save(step, kept=1)
        assert len(workspace.steps) >= min(step - 1, 2)
    workspace.saver.finish_pending_save(4)
    assert workspace.steps == [1, 3, 4]
    workspace.save(5, kept=5, wait=True)
    assert workspace.steps == [1, 4, 5]  # step 4 may return to step 1
    workspace.save(6, kept=5, wait=True)
    assert workspace.steps == [5, 6]


def test_what_an_interrupted_save_left_is_removed(workspace: Workspace) -> None:
    left = workspace.folder / "step_00000003.9a.partial"
    left.mkdir()
    workspace.save(4)
    assert not left.exists()
    workspace.saver.finish_pending_save(4)
    assert workspace.steps == [4]


def test_a_checkpoint_that_was_not_replaced_yet_stays(workspace: Workspace) -> None:
    workspace.save(3, wait=True)
    (workspace.folder / "step_00000003").rename(workspace.folder / "step_00000003.old.partial")
    workspace.save(4, wait=True)
    assert workspace.steps == [3, 4]


def test_checkpoints_that_cannot_be_deleted_do_not_stop_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    for step in (1, 2):
        workspace.save(step, wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", busy)
        workspace.save(3, wait=True)
        assert workspace.unfinished() == ["step_00000001.removed.partial"]
    assert workspace.steps == [2, 3]
    with monkeypatch.context() as patched, caplog.at_level("WARNING", "dms_train"):
        patched.setattr(Path, "rename", busy)
        assert remove_old(workspace.folder / "step_00000003", 1, Removals())
    assert "step_00000002: cannot be deleted (Device or resource busy)" in caplog.text
    workspace.save(4, wait=True)
    assert workspace.steps == [3, 4]
    assert workspace.unfinished() == []


def test_training_does_not_wait_for_storage_that_deletes_slowly(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, delete = threading.Event(), shutil.rmtree

    def slow(folder: Path, **how: Any) -> None:
        assert goes_on.wait(60)
        delete(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", slow)
    monkeypatch.setattr(saving, "_REMOVAL_PATIENCE_SECONDS", 0.0)
    for step in range(1, 6):
        workspace.save(step, wait=True)
    assert workspace.steps == [4, 5]
    assert len(list(workspace.folder.glob("*.removed.partial"))) == 3
    goes_on.set()
    assert workspace.unfinished() == []


def test_an_annotation_that_cannot_be_written_does_not_stop_training(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    workspace.engine.annotate = full  # type: ignore[attr-defined]
    with caplog.at_level("WARNING", "dms_train"):
        workspace.saver.annotate(TrainState(step=1), {"exported": "cr2"})
    assert "step_00000001: cannot be updated ([Errno 28] No space left" in caplog.text


def test_a_full_disk_is_counted_and_costs_no_checkpoint(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.save(1, wait=True)
    workspace.engine.full = True
    for step in (2, 3):
        workspace.save(step)
        workspace.saver.poll(step)
        workspace.saver.poll(step)
    workspace.save(4, wait=True)
    assert workspace.steps == [1]
    assert workspace.rows.of("train/failed_checkpoints") == [(2, 1), (3, 2), (4, 3)]
    workspace.engine.full = False
    workspace.save(5, required=True)
    assert workspace.steps == [1, 5]


def test_a_required_checkpoint_that_cannot_be_written_ends_the_run(workspace: Workspace) -> None:
    workspace.save(1, wait=True)
    workspace.engine.full = True
    with pytest.raises(ValueError, match=r"step_00000002: cannot be written \(full\)"):
        workspace.save(2, required=True)
    assert workspace.steps == [1]
