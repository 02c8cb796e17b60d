"""Which checkpoints are waited for, kept, deleted and owed; over an engine that writes slowly."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import NoProgress
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver, remove_old
from dms_train.training.state import TrainState


class SlowEngine:
    """Completes a background save when it has been asked for the second time, or waited for."""

    def __init__(self) -> None:
        self.pending: tuple[Path, dict[str, Any]] | None = None
        self.asked = 0
        self.full = False  # the disk

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        assert self.pending is None, "two saves at once"
        path.with_name(path.name + ".1f.partial").mkdir(parents=True)
        self.pending, self.asked = (path, state), 0
        if wait:
            self.finish_save(wait=True)

    def finish_save(self, *, wait: bool) -> Path | None:
        self.asked += 1
        if self.pending is None or not (wait or self.asked > 1):
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


class Room:
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
            compute=Compute(forward_flops=1.0, devices=1),
        )
        self.saver = Saver(
            engine=self.engine,  # type: ignore[arg-type]
            reporter=reporter,
            options=RunOptions(dir="unused", keep_checkpoints=2, **options),
            folder=folder,
            leads=True,
            provenance={},
        )

    def save(self, step: int, **how: bool) -> None:
        how = {"permanent": False, "owed": False, **how}
        self.saver.save(TrainState(step=step), **how)

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_????????"))


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def test_training_goes_on_until_a_poll_finds_the_checkpoint_complete(room: Room) -> None:
    room.save(4)
    assert room.steps == []
    room.saver.poll(5)
    assert room.steps == []
    room.saver.poll(6)
    assert room.steps == [4]
    assert [step for step, _ in room.rows.of("train/checkpoint_seconds")] == [6]


def test_a_save_waits_for_the_one_before(room: Room) -> None:
    room.save(4)
    room.save(5)
    assert room.steps == [4]
    room.saver.settle(5)
    assert room.steps == [4, 5]


@pytest.mark.parametrize("how", ["owed", "wait"])
def test_an_owed_checkpoint_is_there_at_once(room: Room, how: str) -> None:
    room.save(4)
    room.save(5, **{how: True})
    assert room.steps == [4, 5]
    assert room.engine.pending is None


def test_without_async_save_every_checkpoint_is_waited_for(tmp_path: Path) -> None:
    room = Room(tmp_path, async_save=False)
    room.save(4)
    assert room.steps == [4]


def test_old_ones_go_only_when_a_new_one_is_complete(room: Room) -> None:
    room.save(1, permanent=True, wait=True)
    for step in (2, 3, 4):
        room.save(step)
        assert len(room.steps) >= min(step - 1, 2)
    room.saver.settle(4)
    assert room.steps == [1, 3, 4]


def test_what_an_interrupted_save_left_is_removed(room: Room) -> None:
    left = room.folder / "step_00000003.9a.partial"
    left.mkdir()
    room.save(4)
    assert not left.exists()
    room.saver.settle(4)
    assert room.steps == [4]


def test_a_checkpoint_that_was_not_replaced_yet_stays(room: Room) -> None:
    room.save(3, wait=True)
    (room.folder / "step_00000003").rename(room.folder / "step_00000003.old.partial")
    room.save(4, wait=True)
    assert room.steps == [3, 4]


def test_what_the_storage_does_not_delete_is_no_reason_to_stop(
    room: Room, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    for step in (1, 2):
        room.save(step, wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", busy)
        room.save(3, wait=True)
    assert room.steps == [2, 3]  # what is left of 1 is no checkpoint
    with monkeypatch.context() as patched, caplog.at_level("WARNING", "dms_train"):
        patched.setattr(Path, "rename", busy)
        assert remove_old(room.folder / "step_00000003", 1)
    assert "step_00000002: cannot be deleted (Device or resource busy)" in caplog.text
    room.save(4, wait=True)
    assert room.steps == [3, 4]
    assert not list(room.folder.glob("*.partial"))


def test_a_note_that_cannot_be_written_is_no_reason_to_stop(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    room.engine.annotate = full  # type: ignore[attr-defined]
    with caplog.at_level("WARNING", "dms_train"):
        room.saver.annotate(TrainState(step=1), {"exported": "cr2"})
    assert "step_00000001: cannot be updated ([Errno 28] No space left" in caplog.text


def test_a_full_disk_is_counted_and_costs_no_checkpoint(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    room.save(1, wait=True)
    room.engine.full = True
    for step in (2, 3):
        room.save(step)
        room.saver.poll(step)
        room.saver.poll(step)
    room.save(4, wait=True)
    assert room.steps == [1]
    assert room.rows.of("train/failed_checkpoints") == [(2, 1), (3, 2), (4, 3)]
    room.engine.full = False
    room.save(5, owed=True)
    assert room.steps == [1, 5]


def test_an_owed_checkpoint_that_cannot_be_written_ends_the_run(room: Room) -> None:
    room.save(1, wait=True)
    room.engine.full = True
    with pytest.raises(ValueError, match=r"step_00000002: cannot be written \(full\)"):
        room.save(2, owed=True)
    assert room.steps == [1]
