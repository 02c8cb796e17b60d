"""The training loop: stages, their plans, exports and evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.training import loop
from dms_train.training.options import RetrofitOptions
from dms_train.training.stages import build_stages
from dms_train.training.state import TrainState
from tests.support.training_loop import (
    BATCH,
    OPTIONS,
    STEPS,
    FakeParts,
    components,
    only,
    run,
)


def test_stages_run_in_order_with_the_plans_of_their_steps(tmp_path: Path) -> None:
    fakes = run(tmp_path)
    plans = fakes.plans
    assert [plan.step for plan in plans] == list(range(STEPS))
    assert [plan.stage_step for plan in plans] == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert [plan.loss for plan in plans] == ["lm"] * 2 + ["distill"] * 12
    factors = [plan.channel_scale for plan in plans]
    assert factors == pytest.approx([1, 1, 2 / 3, 1 / 3, 0] + [0] * 9)
    assert factors[4] == 0.0
    assert [plan.eviction for plan in plans] == ["none"] * 5 + ["soft"] * 9
    assert [plan.target_cr for plan in plans] == [1] * 5 + [1.5, 2, 2.5, 3, 3.5, 4] + [4] * 3
    assert all(plan.noise for plan in plans)


def test_each_stage_sets_its_own_learning_rate(tmp_path: Path) -> None:
    rates = [rate for (rate,) in run(tmp_path).of("begin")]
    assert [(r.style, r.steps, r.max_lr) for r in rates] == [
        ("cosine", 2, 1e-4),
        ("constant", 3, 5e-5),
        ("constant", 6, 1e-4),
        ("cosine", 3, 1e-4),
    ]
    assert [r.min_lr for r in rates] == pytest.approx([1e-5, 5e-5, 1e-4, 1e-5])


def test_every_step_uses_the_next_samples(tmp_path: Path) -> None:
    fakes = run(tmp_path)
    batches = [batches for _, batches in fakes.of("train")]
    assert batches == [[step * BATCH] for step in range(STEPS)]
    assert fakes.ahead == [step * BATCH for step in range(1, STEPS + 1)]  # of the step that follows


def test_the_eviction_channel_is_reset_once_between_zeroing_and_retrofit(
    tmp_path: Path,
) -> None:
    fakes = run(tmp_path)
    assert len(fakes.of("reset_channel")) == 1
    at = fakes.events.index(("reset_channel",))
    trained_before = [e for e in fakes.events[:at] if e[0] == "train"]
    assert len(trained_before) == 5
    evaluated = [e for e in fakes.events[:at] if e[0] == "evaluate"][-1]
    assert evaluated[1].stage_step == 2  # the stage is evaluated with its own weights
    assert ("save", "step_00000005", False) in fakes.events[at:]


def test_a_retrofit_without_zeroing_resets_the_channel_first(
    tmp_path: Path,
) -> None:
    fakes = run(tmp_path, only("retrofit", "export"))
    assert [e[0] for e in fakes.events].index("reset_channel") == 0
    assert len(fakes.of("reset_channel")) == 1


def test_zeroing_alone_resets_the_channel_and_exports_the_result(tmp_path: Path) -> None:
    fakes = run(tmp_path, only("zero_neuron", "export"))
    assert len(fakes.of("reset_channel")) == 1
    assert fakes.of("export") == [("final", 3, 1.0)]


def test_the_reset_of_the_eviction_channel_can_be_disabled(tmp_path: Path) -> None:
    kept = replace(OPTIONS.zero_neuron, resets_eviction_channel=False)
    fakes = run(tmp_path, only("zero_neuron", "retrofit", "export", zero_neuron=kept))
    assert fakes.of("reset_channel") == []
    assert fakes.plans[-1].eviction == "soft"  # decisions are read nevertheless


def test_the_channel_of_a_student_that_evicts_is_not_reset_again(
    tmp_path: Path,
) -> None:
    state = TrainState(eviction_enabled=True, target_cr=4.0)
    fakes = run(tmp_path, only("hold", "export"), state)
    assert fakes.of("reset_channel") == []


def test_an_export_from_before_the_reset_is_not_final_after_it(tmp_path: Path) -> None:
    nothing_to_anneal = RetrofitOptions(target_cr=2.0, start_cr=2.0, steps_per_cr=5, lr=1e-4)
    fakes = run(tmp_path, only("export", "retrofit", "export", retrofit=nothing_to_anneal))
    assert [name for name, *_ in fakes.of("export")] == ["final", "final"]
    assert fakes.of("alias") == []


def test_hold_keeps_the_ratio_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    fakes = FakeParts()
    state = TrainState(eviction_enabled=True, target_cr=6.0)
    loop.run(build_stages(only("hold"), 0, 6.0), state, components(fakes, tmp_path))
    assert [plan.target_cr for plan in fakes.plans] == [6.0] * 3


def test_a_retrofit_continues_from_the_ratio_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    fakes = FakeParts()
    state = TrainState(eviction_enabled=True, loaded_cr=2.0, target_cr=2.0)
    loop.run(build_stages(only("retrofit"), 0, 2.0), state, components(fakes, tmp_path))
    assert [plan.target_cr for plan in fakes.plans] == [2.5, 3.0, 3.5, 4.0]


def test_integer_ratios_are_exported_when_passed_and_final_after_hold(
    tmp_path: Path,
) -> None:
    fakes = run(tmp_path)
    assert fakes.of("export") == [
        ("cr2", 7, 2.0),
        ("cr3", 9, 3.0),
        ("cr4", 11, 4.0),
        ("final", 14, 4.0),
    ]
    assert fakes.of("alias") == []


def test_final_is_an_alias_when_the_last_ratio_is_the_last_thing_trained(tmp_path: Path) -> None:
    fakes = run(tmp_path, only("zero_neuron", "retrofit", "export"))
    assert [e[0] for e in fakes.of("export")] == ["cr2", "cr3", "cr4"]
    assert fakes.of("alias") == [("final", "cr4")]


def test_a_fractional_target_is_exported_as_final(tmp_path: Path) -> None:
    retrofit = RetrofitOptions(target_cr=2.5, steps_per_cr=3, lr=1e-4)
    fakes = run(tmp_path, only("retrofit", "export", retrofit=retrofit))
    assert fakes.of("export") == [("cr2", 3, 2.0), ("final", 5, 2.5)]


def test_a_coarse_schedule_that_skips_integers_exports_what_it_reached(tmp_path: Path) -> None:
    retrofit = RetrofitOptions(target_cr=6.0, steps_per_cr=1, start_cr=1.5, lr=1e-4)
    fakes = run(tmp_path, only("retrofit", retrofit=retrofit))
    assert [e[0] for e in fakes.of("export")] == ["cr2", "cr3", "cr4", "cr5", "cr6"]
    assert fakes.plans[-1].target_cr == 6.0


def test_without_integer_exports_only_final_is_written(tmp_path: Path) -> None:
    fakes = run(tmp_path, every_integer_cr=False)
    assert fakes.of("export") == [("final", 14, 4.0)]


def test_evaluations_use_the_inference_rule_at_stage_ends_and_intervals(tmp_path: Path) -> None:
    fakes = run(tmp_path, eval_interval=4)
    evaluated = [(plan.step, plan.eviction, plan.target_cr) for plan, _ in fakes.of("evaluate")]
    assert evaluated == [
        (2, "none", 1.0),
        (4, "none", 1.0),
        (5, "none", 1.0),
        (8, "hard", 2.5),
        (11, "hard", 4.0),
        (12, "hard", 4.0),
        (14, "hard", 4.0),
    ]
    scales = [plan.channel_scale for plan, _ in fakes.of("evaluate")]
    assert scales == pytest.approx([1, 1 / 3, 0, 0, 0, 0, 0])
    assert all(batches == ["valid"] for _, batches in fakes.of("evaluate"))


def test_an_interval_that_falls_on_a_stage_end_evaluates_once(tmp_path: Path) -> None:
    fakes = run(tmp_path, eval_interval=1)
    assert len(fakes.of("evaluate")) == STEPS


def test_without_validation_data_there_is_no_evaluation(tmp_path: Path) -> None:
    assert run(tmp_path, eval_interval=1, evaluates=False).of("evaluate") == []
