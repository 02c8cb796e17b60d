"""The training loop: what is saved and kept, and runs that resume after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dms_train.training import loop
from dms_train.training.errors import DivergenceError
from dms_train.training.stages import build_stages
from dms_train.training.state import TrainState
from tests.support.training_loop import (
    ALL,
    BATCH,
    OPTIONS,
    STEPS,
    FakeParts,
    components,
    only,
    restored,
    run,
    timeline,
)


def folders(tmp_path: Path) -> list[int]:
    found = (tmp_path / "checkpoints").glob("step_????????")  # others are being deleted
    return sorted(int(path.name.removeprefix("step_")) for path in found)


VALIDATED = only("zero_neuron", "export", "validate_export")


def test_intervals_stage_ends_and_integer_ratios_are_saved(tmp_path: Path) -> None:
    saves = run(tmp_path, save_interval=2, keep_checkpoints=99).of("save")
    steps = (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14)
    assert saves == [(f"step_{step:08d}", False) for step in steps]


@pytest.mark.parametrize(
    ("interval", "keep", "left"),
    [(1, 1, [14]), (1, 3, [12, 13, 14]), (0, 2, [11, 14]), (0, 4, [7, 9, 11, 14])],
)
def test_only_the_newest_checkpoints_are_kept(
    tmp_path: Path, interval: int, keep: int, left: list[int]
) -> None:
    run(tmp_path, save_interval=interval, keep_checkpoints=keep)
    assert folders(tmp_path) == left


def test_weights_of_a_stage_are_kept_unless_an_export_holds_them(tmp_path: Path) -> None:
    """CR 4, the end of the annealing, is exported; without that export its weights are kept."""
    zeroed = [("pretrain", 2, False), ("zero_neuron", 5, True)]
    assert run(tmp_path / "a").of("weights") == zeroed
    annealed = ("retrofit", 11, True)
    assert run(tmp_path / "b", every_integer_cr=False).of("weights") == [*zeroed, annealed]


@pytest.mark.parametrize("step", [4, 5, 6])
def test_weights_of_a_stage_are_kept_by_a_resumed_run(tmp_path: Path, step: int) -> None:
    run(tmp_path, fails_at=step, save_interval=1)
    again = run(tmp_path, state=restored(tmp_path, step))
    assert again.of("weights") == ([("zero_neuron", 5, True)] if step < 6 else [])


def test_the_checkpoint_of_a_stage_is_kept_if_its_weights_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(FakeParts):
        def save_weights(self, path: Path, state: dict[str, Any]) -> None:
            if path.name == "zero_neuron":
                raise ValueError(f"checkpoint {path}: cannot be written (full): make room")
            super().save_weights(path, state)

    with caplog.at_level("WARNING", "dms_train"):
        run(tmp_path, save_interval=1, keep_checkpoints=1, fakes=Full())
    assert folders(tmp_path) == [5, STEPS]
    kept = tmp_path / "checkpoints" / "step_00000005"
    assert f"zero_neuron: cannot be written (full); {kept} becomes permanent" in caplog.text


def test_only_the_main_rank_removes_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, save_interval=1, keep_checkpoints=1, is_main_rank=False)
    assert folders(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("text", [None, "", '{"perm', "[]", '{"step": 1}'])
def test_a_folder_that_cannot_be_read_is_not_removed(tmp_path: Path, text: str | None) -> None:
    damaged = tmp_path / "checkpoints" / "step_00000000"
    damaged.mkdir(parents=True)
    if text is not None:
        (damaged / "run_state.json").write_text(text)
    run(tmp_path, save_interval=1, keep_checkpoints=1)
    assert folders(tmp_path) == [0, 14]


def test_a_damaged_later_checkpoint_does_not_displace_new_ones(tmp_path: Path) -> None:
    """The run resumed before step 900, whose shards are missing."""
    later = tmp_path / "checkpoints" / "step_00000900"
    later.mkdir(parents=True)
    (later / "run_state.json").write_text('{"permanent": false}')
    run(tmp_path, save_interval=1, keep_checkpoints=1, fails_at=9)
    assert folders(tmp_path) == [9, 900]


def test_zero_interval_saves_stage_ends_and_integer_ratios_only(tmp_path: Path) -> None:
    assert [name for name, _ in run(tmp_path).of("save")] == [
        f"step_{step:08d}" for step in (2, 5, 7, 9, 11, 14)
    ]


def test_checkpoints_carry_the_position_and_the_provenance(tmp_path: Path) -> None:
    run(tmp_path, save_interval=1, keep_checkpoints=99)
    text = (tmp_path / "checkpoints" / "step_00000009" / "run_state.json").read_text()
    assert json.loads(text) == {
        "stage": 2,
        "stage_step": 4,
        "step": 9,
        "consumed_samples": 9 * BATCH,
        "loaded_cr": 1.0,
        "target_cr": 3.0,
        "channel_scale": 0.0,
        "eviction_enabled": True,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "exported": "cr3",
        "due_export": None,
        "branch_start": None,
        "kept_step": None,
        "early_stop": None,
        "permanent": False,
        "architecture": {"family": "llama"},
    }


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_resuming_at_any_step_continues_as_if_uninterrupted(tmp_path: Path, step: int) -> None:
    """The same plans, samples, reset, evaluations and exports as without interruption."""
    often = {"save_interval": 1, "keep_checkpoints": 99}
    whole = timeline(run(tmp_path / "whole", **often))
    cut = tmp_path / "cut"
    first = timeline(run(cut, fails_at=step if step < STEPS else "final", **often))
    second = timeline(run(cut, state=restored(cut, step), **often))
    assert first
    assert second
    assert first + second == whole


def test_resuming_after_a_failed_alias_creates_it(tmp_path: Path) -> None:
    stages = only("retrofit", "export")
    run(tmp_path, stages, fails_at="final")
    again = run(tmp_path, stages, restored(tmp_path, 6))
    assert timeline(again) == [("alias", "final", "cr4")]


@pytest.mark.parametrize(("name", "step"), [("cr2", 7), ("cr3", 9), ("cr4", 11)])
def test_a_failed_export_costs_no_step(tmp_path: Path, name: str, step: int) -> None:
    whole = run(tmp_path / "whole").plans
    first = run(tmp_path / "cut", fails_at=name)
    again = run(tmp_path / "cut", state=restored(tmp_path / "cut", step))
    assert first.plans + again.plans == whole
    exported = [made for made, *_ in first.of("export") + again.of("export")]
    assert exported == ["cr2", "cr3", "cr4", "final"]


def test_a_finished_run_does_nothing_when_started_again(tmp_path: Path) -> None:
    run(tmp_path)
    again = run(tmp_path, state=restored(tmp_path, STEPS))
    assert again.events == [("done", name, STEPS) for name in ALL]


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_with_a_stop_request_saves_that_step_and_resumes_from_it(
    tmp_path: Path, step: int
) -> None:
    """No event is repeated or missing, whatever the step of the request."""
    whole = timeline(run(tmp_path / "whole"))
    cut = tmp_path / "cut"
    first = run(cut, stops_at=step)
    assert first.of("stopped") == [(step,)]
    assert len(first.plans) == step
    again = run(cut, state=restored(cut, step))
    assert again.of("stopped") == []
    assert timeline(first) + timeline(again) == whole


def test_a_stop_request_in_the_last_step_keeps_what_is_finished(tmp_path: Path) -> None:
    fakes = run(tmp_path, only("zero_neuron", "export"), stops_at=3)
    assert fakes.of("stopped") == [(3,)]
    again = run(tmp_path, only("zero_neuron", "export"), restored(tmp_path, 3), stops_at=0)
    assert again.of("stopped") == []
    assert again.of("done") == [("zero_neuron", 3), ("export", 3)]


def test_a_run_interrupted_in_validation_repeats_it_and_trains_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, VALIDATED, fails_at="validate")
    assert first.of("validate") == []
    again = run(tmp_path, VALIDATED, restored(tmp_path, 3))
    assert timeline(again) == [("validate",)]
    assert timeline(run(tmp_path, VALIDATED, restored(tmp_path, 3))) == []


def test_a_run_interrupted_in_an_evaluation_continues_it_and_trains_nothing(tmp_path: Path) -> None:
    stages = only("zero_neuron", "export", "run_tasks")
    assert run(tmp_path, stages, fails_at="tasks").of("tasks") == []
    again = run(tmp_path, stages, restored(tmp_path, 3))
    assert timeline(again) == [("tasks",)]
    name = "run_tasks/exam_sheets.0.25-1-4.accuracy"
    assert again.of("summary")[-1] == ({name: 0.5},)
    assert again.of("done")[-1] == ("run_tasks", 3)


def test_a_resumed_run_counts_the_skipped_steps_before(tmp_path: Path) -> None:
    fakes = run(tmp_path, skips={6, 7}, fails_at=8, save_interval=1)
    assert fakes.of("interrupted")
    with pytest.raises(DivergenceError, match=r"step 9: .* skipped step 3 in a row"):
        run(tmp_path, state=restored(tmp_path, 8), skips={8})


def test_a_checkpoint_being_written_is_finished_before_the_run_fails(tmp_path: Path) -> None:
    fakes, waited = FakeParts(), []
    fakes.skips = {6, 7, 8}
    fakes.finish_save = lambda *, wait: waited.append(wait)  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match="skipped step 3 in a row"):
        loop.run(build_stages(OPTIONS, 0), TrainState(), components(fakes, tmp_path))
    assert len(fakes.plans) == 9
    assert waited[-1]
