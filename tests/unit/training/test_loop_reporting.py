"""The training loop: reported rows, finished stages and skipped steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dms_train.method.plan import StepPlan
from dms_train.training.errors import DivergenceError
from tests.support.training_loop import (
    ALL,
    BATCH,
    STEPS,
    only,
    run,
    timeline,
)

VALIDATED = only("zero_neuron", "export", "validate_export")


def test_every_finished_stage_is_reported_after_it_is_saved(tmp_path: Path) -> None:
    fakes = run(tmp_path)
    assert [name for name, _ in fakes.of("done")] == list(ALL)
    marks = [e for e in fakes.events if e[0] in ("done", "save")]
    assert marks.index(("done", "zero_neuron", 5)) > marks.index(("save", "step_00000005", False))
    assert len(fakes.of("beat")) == STEPS


def test_reported_rows_name_what_the_stage_measures(tmp_path: Path) -> None:
    rows: dict[int, dict[str, float]] = {}
    for step, values in run(tmp_path).of("log"):
        rows.setdefault(step, {}).update(values)
    assert rows[1]["train/lm"] == 0.75
    assert rows[3]["train/channel_scale"] == pytest.approx(2 / 3)
    assert rows[7]["train/kl"] == 0.75
    assert rows[7]["train/target_cr"] == 2.0
    assert rows[7]["train/cr"] == 1.5
    assert rows[11]["eval/kv_reads"] == 10.0
    assert rows[7]["tokens"] == 7 * 128
    assert rows[7]["train/memory_gib"] == 2.0
    # forward, backward (twice that) and the teacher; two devices
    rate = rows[7]["train/tokens_per_second"]
    assert rows[7]["train/tflops_per_device"] == pytest.approx(rate * 4 * 10.0 / 2 / 1e12)
    assert rows[1]["train/tflops_per_device"] == pytest.approx(
        rows[1]["train/tokens_per_second"] * 3 * 10.0 / 2 / 1e12
    )
    assert rows[11]["eval/kept"] == ((0.5, 1.0),)
    assert rows[11]["eval/kept_layers"] == (3,)
    assert "train/target_cr" not in rows[3]


def test_the_last_short_interval_of_a_stage_is_reported_too(tmp_path: Path) -> None:
    rows = [(step, set(values)) for step, values in run(tmp_path, log_interval=4).of("log")]
    reported = [step for step, names in rows if "train/loss" in names]
    assert reported == [2, 4, 5, 8, 11, 12, 14]


def test_a_skipped_step_is_counted_and_the_schedules_advance(tmp_path: Path) -> None:
    fakes = run(tmp_path, skips={3, 4, 8})
    assert fakes.plans == run(tmp_path / "other").plans
    rows = {step: values for step, values in fakes.of("log") if "train/lr" in values}
    assert sorted(rows) == list(range(1, STEPS + 1))
    counted = [rows[step].get("train/skipped_steps", 0) for step in sorted(rows)]
    assert counted == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [step for step, row in rows.items() if "train/loss" not in row] == [4, 5, 9]


def test_the_samples_of_a_skipped_step_are_recorded(tmp_path: Path) -> None:
    fakes = run(tmp_path, skips={7})
    (file,) = (tmp_path / "skipped").iterdir()
    described = json.loads(file.read_text())
    assert file.name == "step_00000008.json"
    assert described["step"] == 8
    assert described["samples"] == list(range(7 * BATCH, 8 * BATCH))
    assert StepPlan.from_dict(described["plan"]) == fakes.plans[7]
    assert described["loss"] == "nan"


@pytest.mark.parametrize("count", [1, 3])
def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path: Path, count: int) -> None:
    with pytest.raises(
        DivergenceError, match=rf"step {5 + count}: loss is nan, .* {count} in a row"
    ):
        run(
            tmp_path,
            skips={2, *range(5, 12)} - ({2} if count == 1 else set()),
            max_skipped_steps=count,
        )
    assert len(list((tmp_path / "skipped").iterdir())) == count + (count > 1)


@pytest.mark.parametrize("stage", ["zero_neuron", "retrofit"])
def test_a_stage_whose_steps_were_all_skipped_ends_the_run_without_an_export(
    tmp_path: Path, stage: str
) -> None:
    """Also when it is shorter than `max_skipped_steps`; the stages before it count for nothing."""
    first, last = {"zero_neuron": (3, 5), "retrofit": (6, 11)}[stage]
    skipped = set(range(first - 1, last))
    with pytest.raises(DivergenceError, match=rf"{stage}: all {len(skipped)} steps were skipped"):
        run(tmp_path, skips=skipped, max_skipped_steps=100)
    names = [path.name for path in (tmp_path / "checkpoints").glob("*")]
    assert f"step_{last:08d}" not in names
    run(tmp_path / "other", skips=skipped - {last - 1}, max_skipped_steps=100)


def test_validation_follows_the_export_and_is_reported(tmp_path: Path) -> None:
    fakes = run(tmp_path, VALIDATED)
    assert [e[0] for e in timeline(fakes)][-2:] == ["export", "validate"]
    assert (3, {"tokens": 3 * 128, "validate_export/cr_factor": 2.5}) in fakes.of("log")
    assert fakes.of("summary")[-1] == ({"validate_export/cr_factor": 2.5},)
