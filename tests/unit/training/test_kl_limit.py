"""The annealing ends at the last ratio whose validation KL is within `stage.retrofit.max_kl`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.evaluation.plots import read_rows
from dms_train.evaluation.run_report import early_stop_sentence
from dms_train.method.plan import StepPlan
from dms_train.observe.sinks import METRICS_FILE, JsonlSink
from dms_train.planning.check import check
from dms_train.training.errors import KLLimitError
from dms_train.training.options import StageOptions
from dms_train.training.state import describe_early_stop
from tests.support import configs
from tests.support.training_loop import BATCH, OPTIONS, FakeParts, Interrupted, restored, run

# retrofit reaches CR 2 after step 7, CR 3 after step 9 and CR 4 after step 11; a hold has 3 steps
LIMITED = replace(OPTIONS, retrofit=replace(OPTIONS.retrofit, max_kl=0.5))


class Fakes(FakeParts):
    """Evaluations have a KL of 0.2 times the ratio: above 0.5 from ratio 3 on."""

    def kl(self, plan: StepPlan) -> float:
        return 0.2 * plan.target_cr


def limited(folder: Path, stages: StageOptions = LIMITED, **options: Any) -> Fakes:
    fakes = Fakes(options.pop("fails_at", None), options.pop("stops_at", None))
    run(folder, stages, fakes=fakes, **options)
    return fakes


def trained(fakes: FakeParts) -> list[tuple[int, float, int]]:
    """Step, ratio and first sample of every step."""
    return [(plan.step, plan.target_cr, first[0]) for plan, first in fakes.of("train")]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints that are left."""
    paths = (folder / "checkpoints").glob("step_????????")
    return sorted(int(path.name.removeprefix("step_")) for path in paths)


def test_the_run_holds_and_exports_the_last_ratio_within_the_limit(tmp_path: Path) -> None:
    fakes = limited(tmp_path)
    annealed = [(5, 1.5), (6, 2.0), (7, 2.5), (8, 3.0)]
    assert [(s, cr) for s, cr, _ in trained(fakes)[5:]] == [*annealed, (9, 2), (10, 2), (11, 2)]
    assert [first for *_, first in trained(fakes)] == [BATCH * step for step in range(12)]
    assert fakes.of("load") == [("step_00000007",)]
    assert fakes.of("export") == [("cr2", 7, 2.0), ("final", 12, 2.0)]
    state = restored(tmp_path, 12)
    stop = {"max_kl": 0.5, "cr": 3.0, "kl": pytest.approx(0.6), "kept_cr": 2.0}
    assert state.early_stop == stop
    assert (state.target_cr, state.kept_step) == (2.0, None)
    (row,) = [values for _, values in fakes.of("log") if "early_stop/kl" in values]
    assert row["early_stop/kept_cr"] == 2.0
    assert checkpoints(tmp_path) == [9, 12]


def test_without_a_hold_the_kept_ratio_is_exported_again(tmp_path: Path) -> None:
    """The card of the export `cr2` was written before the limit was reached."""
    fakes = limited(tmp_path, replace(LIMITED, run=("zero_neuron", "retrofit", "export")))
    assert fakes.of("export") == [("cr2", 5, 2.0), ("final", 7, 2.0)]
    assert fakes.of("alias") == []


def test_a_target_between_integers_is_checked_too(tmp_path: Path) -> None:
    stages = replace(LIMITED, retrofit=replace(LIMITED.retrofit, target_cr=2.75))
    assert limited(tmp_path, stages).of("load") == [("step_00000007",)]


def test_a_limit_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    generous = replace(OPTIONS, retrofit=replace(OPTIONS.retrofit, max_kl=0.8))
    fakes, plain = limited(tmp_path / "limited", generous), run(tmp_path / "plain")
    assert trained(fakes) == trained(plain)
    assert fakes.of("export") == plain.of("export")
    assert restored(tmp_path / "limited", 14).early_stop is None
    assert checkpoints(tmp_path / "limited") == checkpoints(tmp_path / "plain")


def test_the_kept_checkpoint_outlives_newer_ones_and_only_one_is_kept(tmp_path: Path) -> None:
    stages = replace(LIMITED, retrofit=replace(LIMITED.retrofit, max_kl=0.7, steps_per_cr=4))
    limited(tmp_path, stages, stops_at=16, save_interval=1, keep_checkpoints=1)
    assert checkpoints(tmp_path) == [13, 16]  # CR 3; that of CR 2 after step 9 is deleted
    assert restored(tmp_path, 16).kept_step == 13


def test_a_first_ratio_above_the_limit_ends_the_run_in_one_line(tmp_path: Path) -> None:
    stages = replace(OPTIONS, retrofit=replace(OPTIONS.retrofit, max_kl=0.3))
    with pytest.raises(KLLimitError, match=r"max_kl=0\.3: .* is 0\.4 .* ratio 2, .*another run"):
        limited(tmp_path, stages)


def test_a_kl_that_is_no_number_is_above_the_limit(tmp_path: Path) -> None:
    class Broken(Fakes):
        def kl(self, plan: StepPlan) -> float:
            return math.nan if plan.target_cr > 2 else 0.1

    fakes = Broken()
    run(tmp_path, LIMITED, fakes=fakes)
    assert fakes.of("load") == [("step_00000007",)]
    sink = JsonlSink(tmp_path)
    for step, values in fakes.of("log"):
        sink.log(step, values)
    sink.close()
    stop = restored(tmp_path, 12).early_stop
    assert stop == {"max_kl": 0.5, "cr": 3.0, "kl": None, "kept_cr": 2.0}
    sentence = describe_early_stop(stop)  # of the card
    assert "ratio 2: the validation KL at ratio 3 was not a finite number (limit 0.5" in sentence
    assert early_stop_sentence(read_rows(tmp_path / METRICS_FILE)) == sentence


@pytest.mark.parametrize("branches", [None, (2,)])
@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("stop", range(6, 14))
def test_a_run_stopped_after_any_step_continues_as_if_uninterrupted(
    tmp_path: Path, stop: int, interval: int, branches: tuple[int, ...] | None
) -> None:
    stages = replace(LIMITED, hold=replace(LIMITED.hold, branch_ratios=branches))
    whole = limited(tmp_path / "whole", stages, save_interval=interval)
    cut = tmp_path / "cut"
    first = limited(cut, stages, stops_at=stop, save_interval=interval)
    if not first.of("stopped"):
        assert stop > len(whole.of("train")) - 1
        return
    state = restored(cut, checkpoints(cut)[-1])
    again = limited(cut, stages, state=state, save_interval=interval)
    assert trained(first) + trained(again) == trained(whole)
    assert first.of("export") + again.of("export") == whole.of("export")
    assert len(checkpoints(cut)) == 2  # run.keep_checkpoints


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("where", [7, 8, 9, 10, "cr2", "final"])
def test_a_run_killed_anywhere_repeats_steps_and_changes_none(
    tmp_path: Path, where: int | str, damaged: bool
) -> None:
    """Also when it resumes from the second newest checkpoint, because the newest is damaged."""
    whole = limited(tmp_path / "whole", save_interval=1)
    cut = tmp_path / "cut"
    first = limited(cut, fails_at=where, save_interval=1)
    assert first.of("interrupted")
    if damaged:
        newest = cut / "checkpoints" / f"step_{checkpoints(cut)[-1]:08d}"
        newest.rename(newest.with_name(f"{newest.name}.damaged"))
    again = limited(cut, state=restored(cut, checkpoints(cut)[-1]), save_interval=1)
    assert set(trained(first) + trained(again)) == set(trained(whole))
    assert set(first.of("export") + again.of("export")) == set(whole.of("export"))
    assert checkpoints(cut) == checkpoints(tmp_path / "whole")


@pytest.mark.parametrize("branches", [None, (2,)])
@pytest.mark.parametrize("step", range(6, 13))
def test_a_run_killed_after_a_save_leaves_no_checkpoint_over(
    tmp_path: Path, step: int, branches: tuple[int, ...] | None
) -> None:
    """The process ends between a save and the deletion of what it replaces."""

    class Killed(Fakes):
        def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
            super().save(path, state, wait=wait)
            if state["step"] == step:
                raise Interrupted

    stages = replace(LIMITED, hold=replace(LIMITED.hold, branch_ratios=branches))
    first = Killed()
    run(tmp_path, stages, fakes=first, save_interval=1)
    assert first.of("interrupted")
    limited(tmp_path, stages, state=restored(tmp_path, step), save_interval=1)
    assert checkpoints(tmp_path) == [11, 12]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"stage__retrofit__annealing": "immediate"}, "needs stage.retrofit.annealing=linear"),
        ({"stage__retrofit__loss": "lm"}, "stage.retrofit.loss=lm has no KL; use distill"),
        ({"run__eval_samples": 0}, "run.eval_samples=0; raise it"),
    ],
)
def test_a_limit_without_a_kl_is_refused(changes: dict[str, Any], line: str) -> None:
    config = configs.config(stage__retrofit__max_kl=0.1, **changes)
    with pytest.raises(ValueError, match=line):
        check(config, world_size=1, architecture=configs.architecture())
