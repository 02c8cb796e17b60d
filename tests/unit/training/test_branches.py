"""Hold branches: each ratio on the way is held and exported, and the annealing is not changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train import limits
from dms_train.app.plan import describe
from dms_train.cli.config_source import compose
from dms_train.training.options import StageOptions
from tests.support import configs
from tests.support.training_loop import BATCH, OPTIONS, STEPS, FakeParts, only, restored, run

# retrofit reaches CR 2 after step 7, CR 3 after step 9 and CR 4 after step 11; a hold has 3 steps
BRANCHED = replace(OPTIONS, hold=replace(OPTIONS.hold, branch_ratios=(2, 3)))


def trained(fakes: FakeParts) -> list[tuple[int, float, int]]:
    """Step, ratio and first sample of every step."""
    return [(plan.step, plan.target_cr, first[0]) for plan, first in fakes.of("train")]


def newest(folder: Path) -> int:
    names = [path.name for path in (folder / "checkpoints").glob("step_????????")]
    return int(max(names).removeprefix("step_"))


def test_the_steps_without_the_branches_are_those_of_a_run_without_branches(tmp_path: Path) -> None:
    fakes = run(tmp_path / "branched", BRANCHED)
    plain = run(tmp_path / "plain").of("train")
    held = [fakes.of("train")[7:10], fakes.of("train")[12:15]]
    rest = fakes.of("train")[:7] + fakes.of("train")[10:12] + fakes.of("train")[15:]
    assert rest == plain
    for start, ratio, steps in zip((7, 9), (2.0, 3.0), held, strict=True):
        assert [(p.step, p.stage_step, p.target_cr) for p, _ in steps] == [
            (start + k, k, ratio) for k in range(3)
        ]
        assert [first for _, first in steps] == [[(start + k) * BATCH] for k in range(3)]


def test_a_branch_is_exported_and_its_start_is_loaded(tmp_path: Path) -> None:
    events = run(tmp_path, BRANCHED, save_interval=1).events
    kinds = [e for e in events if e[0] in ("export", "load")]
    assert kinds == [
        ("export", "cr2", 10, 2.0),
        ("load", "step_00000007"),
        ("export", "cr3", 12, 3.0),
        ("load", "step_00000009"),
        ("export", "cr4", 11, 4.0),
        ("export", "final", 14, 4.0),
    ]
    rates = [e[1] for e in events if e[0] == "begin"]
    assert [(r.style, r.steps) for r in rates[2:8]] == [
        *(("constant", 6), ("cosine", 3)) * 2,
        ("constant", 6),
        ("cosine", 3),
    ]


@pytest.mark.parametrize("every", [True, False])
def test_only_listed_ratios_are_held(tmp_path: Path, every: bool) -> None:
    """The annealing ends at the target, whose hold is the stage; higher ratios are not reached."""
    options = replace(OPTIONS, hold=replace(OPTIONS.hold, branch_ratios=(3, 4, 6)))
    fakes = run(tmp_path, options, every_integer_cr=every)
    exports = [("cr2", 7, 2.0), ("cr3", 12, 3.0), ("cr4", 11, 4.0), ("final", 14, 4.0)]
    assert fakes.of("export") == (exports if every else exports[1::2])


@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("stop", range(1, STEPS + 6))
def test_a_run_stopped_after_any_step_continues_as_if_uninterrupted(
    tmp_path: Path, stop: int, interval: int
) -> None:
    whole = run(tmp_path / "whole", BRANCHED, save_interval=interval)
    cut = tmp_path / "cut"
    first = run(cut, BRANCHED, stops_at=stop, save_interval=interval)
    assert len(first.of("stopped")) == 1
    again = run(cut, BRANCHED, restored(cut, newest(cut)), save_interval=interval)
    assert trained(first) + trained(again) == trained(whole)
    assert first.of("export") + again.of("export") == whole.of("export")


@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("where", [*range(7, 12), "cr2", "cr3", "final"])
def test_a_run_killed_anywhere_repeats_steps_and_changes_none(
    tmp_path: Path, where: int | str, interval: int
) -> None:
    whole = run(tmp_path / "whole", BRANCHED, save_interval=interval)
    cut = tmp_path / "cut"
    first = run(cut, BRANCHED, fails_at=where, save_interval=interval)
    assert first.of("interrupted")
    again = run(cut, BRANCHED, restored(cut, newest(cut)), save_interval=interval)
    assert trained(again) == trained(whole)[-len(trained(again)) :] or not trained(again)
    assert set(first.of("export") + again.of("export")) == set(whole.of("export"))
    assert set(trained(first) + trained(again)) == set(trained(whole))


@pytest.mark.parametrize("interval", [0, 1])
def test_a_failed_export_of_a_branch_is_written_again_without_a_step(
    tmp_path: Path, interval: int
) -> None:
    """The last checkpoint of the branch is then still the newest one."""
    run(tmp_path, BRANCHED, fails_at="cr2", save_interval=interval)
    state = restored(tmp_path, newest(tmp_path))
    assert (state.step, state.branch_start) == (10, 7)
    again = run(tmp_path, BRANCHED, state, save_interval=interval)
    assert again.of("export")[0] == ("cr2", 10, 2.0)
    assert trained(again)[0] == (7, 2.5, 7 * BATCH)


def test_no_checkpoint_of_a_branch_is_left(tmp_path: Path) -> None:
    run(tmp_path, BRANCHED, save_interval=1, keep_checkpoints=99)
    for path in (tmp_path / "checkpoints").glob("step_????????"):
        assert restored(tmp_path, int(path.name.removeprefix("step_"))).branch_start is None


def test_the_start_of_a_branch_is_kept_until_the_branch_ends(tmp_path: Path) -> None:
    run(tmp_path, BRANCHED, fails_at="cr2", save_interval=1, keep_checkpoints=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_????????")) == [
        "step_00000007",
        "step_00000010",
    ]
    run(tmp_path, BRANCHED, restored(tmp_path, 10), save_interval=1, keep_checkpoints=1)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_????????")] == [
        "step_00000014"
    ]


def test_metrics_have_one_row_for_each_branch_and_steps_that_never_fall(tmp_path: Path) -> None:
    fakes = run(tmp_path, BRANCHED, save_interval=1)
    steps = [step for step, _ in fakes.of("log")]
    assert steps == sorted(steps)
    rows = [(step, row) for step, row in fakes.of("log") if "branch/cr2/kl" in row]
    assert [(step, row["branch/cr2/kl"], row["branch/cr2/target_cr"]) for step, row in rows] == [
        (7, 0.75, 2.0)
    ]
    counted = [step for step, row in fakes.of("log") if "train/loss" in row]
    assert counted == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            only("zero_neuron", "retrofit", "export", hold=BRANCHED.hold),
            "stage.hold.branch_ratios=[2, 3]: branches need the stages hold and export; "
            "add hold to stage.run",
        ),
        (
            only(*OPTIONS.run[1:], hold=replace(OPTIONS.hold, branch_ratios=(1, 2))),
            "stage.hold.branch_ratios=[1, 2]: use ratios from 2",
        ),
    ],
)
def test_branches_that_cannot_be_taken_are_refused(options: StageOptions, line: Any) -> None:
    assert list(limits.problems(options, "stage")) == [line]


def test_a_stage_without_an_annealing_ignores_branches() -> None:
    assert not list(limits.problems(only("hold", hold=BRANCHED.hold), "stage"))


def test_the_plan_of_a_run_lists_its_branches() -> None:
    config = compose(["experiment=smollm2_135m", "method.channel=0"])
    lines = describe(config, configs.KNOWN["smollm2_135m"], 1).splitlines()
    branches = [line.strip() for line in lines if "branch" in line]
    assert branches == [
        f"branch at CR {ratio}: 80 steps, then the export cr{ratio}" for ratio in (2, 3, 4, 6)
    ]
