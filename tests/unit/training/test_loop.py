"""The loop over a fake engine: what it asks for, when, and after every possible interruption."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import NoProgress
from dms_train.training import loop
from dms_train.training.errors import DivergenceError
from dms_train.training.loop import LoopParts
from dms_train.training.options import (
    ExportOptions,
    HoldOptions,
    PretrainOptions,
    RetrofitOptions,
    RunOptions,
    StageOptions,
    ZeroNeuronOptions,
)
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.stages import build_stages
from dms_train.training.state import TrainState

BATCH = 16
RESULT = StepResult(
    loss=1.0,
    token_loss=0.75,
    aux_loss=0.25,
    alpha=0.5,
    cr_factor=1.5,
    kv_reads=10.0,
    memory_bytes=2.0**31,
    kept=((0.5, 1.0),),
)
SKIPPED = replace(RESULT, loss=math.nan, token_loss=math.nan, grad_norm=math.nan, skipped=True)
ALL = ("pretrain", "zero_neuron", "retrofit", "hold", "export")
# pretrain 2, zero_neuron 3, retrofit (4 - 1) * 2 = 6, hold 3
OPTIONS = StageOptions(
    run=ALL,
    pretrain=PretrainOptions(steps=2, lr=1e-4),
    zero_neuron=ZeroNeuronOptions(steps=3, lr=5e-5),
    retrofit=RetrofitOptions(target_cr=4.0, steps_per_cr=2, lr=1e-4),
    hold=HoldOptions(steps=3, lr=1e-4),
    export=ExportOptions(),
)
STEPS = 14


class Interrupted(Exception):
    """The process died."""


class World:
    """A fake engine, data source, exporter and sink that write down what they are asked for."""

    def __init__(self, dies_at: int | str | None = None, stops_at: int | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.skips: set[int] = set()  # steps, counted from 0, that are not finite
        self.stops_at = stops_at  # the step after which a signal is known
        self.dies_at = dies_at  # a step, the name of an export or "validate"

    def begin_stage(self, rate: LearningRate) -> None:
        self.events.append(("begin", rate))

    def train_step(self, plan: StepPlan, batches: list[Any]) -> StepResult:
        self._may_die(plan.step)
        self.events.append(("train", plan, batches))
        return SKIPPED if plan.step in self.skips else RESULT

    def evaluate(self, plan: StepPlan, batches: list[Any]) -> StepResult:
        self.events.append(("evaluate", plan, batches))
        return RESULT

    def reset_eviction_channel(self) -> None:
        self.events.append(("hand_over",))

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "run_state.json").write_text(json.dumps(state))
        self.events.append(("save", path.name, state["permanent"]))

    def finish_save(self, *, wait: bool) -> Path | None:
        return None

    def annotate(self, path: Path, state: dict[str, Any]) -> None:
        file = path / "run_state.json"
        if path.is_dir():
            file.write_text(json.dumps({**json.loads(file.read_text()), **state}))

    def microbatches(self, first_sample: int) -> list[Any]:
        return [first_sample]

    def export(self, name: str, state: dict[str, Any]) -> Path:
        self._may_die(name)
        self.events.append(("export", name, state["step"], state["target_cr"]))
        return Path(name)

    def alias(self, name: str, target: str) -> None:
        self._may_die(name)
        self.events.append(("alias", name, target))

    def validate(self) -> dict[str, float]:
        self._may_die("validate")
        self.events.append(("validate",))
        return {"cr_factor": 2.5}

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def beat(self, step: int) -> None:
        self.events.append(("beat", step))

    def must_stop(self) -> bool:
        return self.stops_at is not None and len(self.of("train")) >= self.stops_at

    def stopped(self, step: int) -> None:
        self.events.append(("stopped", step))

    def done(self, stage: str, step: int) -> None:
        self.events.append(("done", stage, step))

    def _may_die(self, where: int | str) -> None:
        if where == self.dies_at:
            raise Interrupted

    def log(self, step: int, values: dict[str, float]) -> None:
        self.events.append(("log", step, values))

    def summary(self, values: dict[str, float]) -> None:
        self.events.append(("summary", values))

    def close(self) -> None:
        self.events.append(("close",))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.of("train")]


def parts(world: World, folder: Path, **options: Any) -> LoopParts:
    every = options.pop("every_integer_cr", True)
    evaluates = options.pop("evaluates", True)
    is_main_rank = options.pop("is_main_rank", True)
    defaults = {"dir": str(folder), "save_interval": 0, "keep_checkpoints": 2}
    reporter = Reporter(
        sinks=[world],
        progress=NoProgress(),
        tokens_per_step=128,
        log_interval=options.get("log_interval", 1),
        throughput=Throughput(),
        means=Means(),
        compute=Compute(forward_flops=10.0, devices=2),
    )
    run_options = RunOptions(**{**defaults, **options})
    return LoopParts(
        engine=world,
        source=world,
        exporter=world,
        validator=world,
        reporter=reporter,
        watch=world,
        saver=Saver(
            engine=world,
            reporter=reporter,
            options=run_options,
            folder=folder / "checkpoints",
            is_main_rank=is_main_rank,
            provenance={"architecture": {"family": "llama"}},
        ),
        skips=SkipRecord(
            folder=folder / "skipped",
            max_consecutive=run_options.max_skipped_steps,
            is_main_rank=is_main_rank,
        ),
        options=run_options,
        global_batch_size=BATCH,
        eval_batches=["valid"] if evaluates else [],
        every_integer_cr=every,
    )


def run(
    folder: Path,
    stages: StageOptions = OPTIONS,
    state: TrainState | None = None,
    dies_at: int | str | None = None,
    stops_at: int | None = None,
    skips: set[int] | None = None,
    **options: Any,
) -> World:
    world = World(dies_at, stops_at)
    world.skips = skips or set()
    built = build_stages(stages, 0)
    try:
        loop.run(built, state or TrainState(), parts(world, folder, **options))
    except Interrupted:
        world.events.append(("died",))
    return world


def only(*names: str, **changes: Any) -> StageOptions:
    return replace(OPTIONS, run=names, **changes)


def test_stages_run_in_order_with_their_plans_at_every_border(tmp_path: Path) -> None:
    world = run(tmp_path)
    plans = world.plans
    assert [plan.step for plan in plans] == list(range(STEPS))
    assert [plan.stage_step for plan in plans] == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert [plan.loss for plan in plans] == ["lm"] * 2 + ["distill"] * 12
    factors = [plan.neuron_scale for plan in plans]
    assert factors == pytest.approx([1, 1, 2 / 3, 1 / 3, 0] + [0] * 9)
    assert factors[4] == 0.0
    assert [plan.eviction for plan in plans] == ["none"] * 5 + ["soft"] * 9
    assert [plan.target_cr for plan in plans] == [1] * 5 + [1.5, 2, 2.5, 3, 3.5, 4] + [4] * 3
    assert all(plan.noise for plan in plans)


def test_each_stage_announces_its_own_rate(tmp_path: Path) -> None:
    rates = [rate for (rate,) in run(tmp_path).of("begin")]
    assert [(r.style, r.steps, r.max_lr) for r in rates] == [
        ("cosine", 2, 1e-4),
        ("constant", 3, 5e-5),
        ("constant", 6, 1e-4),
        ("cosine", 3, 1e-4),
    ]
    assert [r.min_lr for r in rates] == pytest.approx([1e-5, 5e-5, 1e-4, 1e-5])


def test_every_step_takes_the_samples_after_those_of_the_step_before(tmp_path: Path) -> None:
    batches = [batches for _, batches in run(tmp_path).of("train")]
    assert batches == [[step * BATCH] for step in range(STEPS)]


def test_the_eviction_channel_is_handed_over_once_between_zeroing_and_retrofit(
    tmp_path: Path,
) -> None:
    world = run(tmp_path)
    assert len(world.of("hand_over")) == 1
    at = world.events.index(("hand_over",))
    trained_before = [e for e in world.events[:at] if e[0] == "train"]
    assert len(trained_before) == 5
    evaluated = [e for e in world.events[:at] if e[0] == "evaluate"][-1]
    assert evaluated[1].stage_step == 2  # the stage is evaluated with its own weights
    assert ("save", "step_00000005", True) in world.events[at:]


def test_a_retrofit_without_zeroing_hands_over_before_its_first_step(tmp_path: Path) -> None:
    world = run(tmp_path, only("retrofit", "export"))
    assert [e[0] for e in world.events].index("hand_over") == 0
    assert len(world.of("hand_over")) == 1


def test_zeroing_alone_hands_over_and_exports_the_result(tmp_path: Path) -> None:
    world = run(tmp_path, only("zero_neuron", "export"))
    assert len(world.of("hand_over")) == 1
    assert world.of("export") == [("final", 3, 1.0)]


def test_a_hand_over_can_keep_the_eviction_channels_weights(tmp_path: Path) -> None:
    kept = replace(OPTIONS.zero_neuron, resets_eviction_channel=False)
    world = run(tmp_path, only("zero_neuron", "retrofit", "export", zero_neuron=kept))
    assert world.of("hand_over") == []
    assert world.plans[-1].eviction == "soft"  # decisions are read all the same


def test_a_student_whose_eviction_channel_was_borrowed_is_not_handed_over_again(
    tmp_path: Path,
) -> None:
    state = TrainState(eviction_enabled=True, target_cr=4.0)
    world = run(tmp_path, only("hold", "export"), state)
    assert world.of("hand_over") == []


def test_an_export_from_before_the_hand_over_is_not_final_after_it(tmp_path: Path) -> None:
    nothing_to_anneal = RetrofitOptions(target_cr=2.0, start_cr=2.0, steps_per_cr=5, lr=1e-4)
    world = run(tmp_path, only("export", "retrofit", "export", retrofit=nothing_to_anneal))
    assert [name for name, *_ in world.of("export")] == ["final", "final"]
    assert world.of("alias") == []


def test_hold_keeps_the_ratio_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    world = World()
    state = TrainState(eviction_enabled=True, target_cr=6.0)
    loop.run(build_stages(only("hold"), 0, 6.0), state, parts(world, tmp_path))
    assert [plan.target_cr for plan in world.plans] == [6.0] * 3


def test_a_retrofit_continues_from_the_ratio_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    world = World()
    state = TrainState(eviction_enabled=True, loaded_cr=2.0, target_cr=2.0)
    loop.run(build_stages(only("retrofit"), 0, 2.0), state, parts(world, tmp_path))
    assert [plan.target_cr for plan in world.plans] == [2.5, 3.0, 3.5, 4.0]


def test_integer_ratios_are_exported_when_passed_and_final_is_what_hold_made(
    tmp_path: Path,
) -> None:
    world = run(tmp_path)
    assert world.of("export") == [
        ("cr2", 7, 2.0),
        ("cr3", 9, 3.0),
        ("cr4", 11, 4.0),
        ("final", 14, 4.0),
    ]
    assert world.of("alias") == []


def test_final_is_an_alias_when_the_last_ratio_is_the_last_thing_trained(tmp_path: Path) -> None:
    world = run(tmp_path, only("zero_neuron", "retrofit", "export"))
    assert [e[0] for e in world.of("export")] == ["cr2", "cr3", "cr4"]
    assert world.of("alias") == [("final", "cr4")]


def test_a_fractional_target_is_exported_as_final(tmp_path: Path) -> None:
    retrofit = RetrofitOptions(target_cr=2.5, steps_per_cr=3, lr=1e-4)
    world = run(tmp_path, only("retrofit", "export", retrofit=retrofit))
    assert world.of("export") == [("cr2", 3, 2.0), ("final", 5, 2.5)]


def test_a_coarse_schedule_that_skips_integers_exports_what_it_reached(tmp_path: Path) -> None:
    retrofit = RetrofitOptions(target_cr=6.0, steps_per_cr=1, start_cr=1.5, lr=1e-4)
    world = run(tmp_path, only("retrofit", retrofit=retrofit))
    assert [e[0] for e in world.of("export")] == ["cr2", "cr3", "cr4", "cr5", "cr6"]
    assert world.plans[-1].target_cr == 6.0


def test_without_integer_exports_only_final_is_written(tmp_path: Path) -> None:
    world = run(tmp_path, every_integer_cr=False)
    assert world.of("export") == [("final", 14, 4.0)]


def test_evaluations_judge_by_the_inference_rule_at_ends_and_intervals(tmp_path: Path) -> None:
    world = run(tmp_path, eval_interval=4)
    evaluated = [(plan.step, plan.eviction, plan.target_cr) for plan, _ in world.of("evaluate")]
    assert evaluated == [
        (2, "none", 1.0),
        (4, "none", 1.0),
        (5, "none", 1.0),
        (8, "hard", 2.5),
        (11, "hard", 4.0),
        (12, "hard", 4.0),
        (14, "hard", 4.0),
    ]
    scales = [plan.neuron_scale for plan, _ in world.of("evaluate")]
    assert scales == pytest.approx([1, 1 / 3, 0, 0, 0, 0, 0])
    assert all(batches == ["valid"] for _, batches in world.of("evaluate"))


def test_an_interval_that_falls_on_a_stage_end_evaluates_once(tmp_path: Path) -> None:
    world = run(tmp_path, eval_interval=1)
    assert len(world.of("evaluate")) == STEPS


def test_nothing_to_evaluate_on_means_no_evaluation(tmp_path: Path) -> None:
    assert run(tmp_path, eval_interval=1, evaluates=False).of("evaluate") == []


def folders(tmp_path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (tmp_path / "checkpoints").iterdir())


def test_intervals_save_temporarily_stage_ends_and_integer_ratios_permanently(
    tmp_path: Path,
) -> None:
    saves = run(tmp_path, save_interval=2, keep_checkpoints=99).of("save")
    assert saves == [
        ("step_00000002", True),
        ("step_00000004", False),
        ("step_00000005", True),
        ("step_00000006", False),
        ("step_00000007", True),
        ("step_00000008", False),
        ("step_00000009", True),
        ("step_00000010", False),
        ("step_00000011", True),
        ("step_00000012", False),
        ("step_00000014", True),
    ]


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [2, 5, 7, 9, 11, 13, 14]), (3, [2, 5, 7, 9, 10, 11, 12, 13, 14])]
)
def test_retention_keeps_the_newest_temporary_and_all_permanent_ones(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    run(tmp_path, save_interval=1, keep_checkpoints=keep)
    assert folders(tmp_path) == left


def test_only_the_leading_process_removes_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, save_interval=1, keep_checkpoints=1, is_main_rank=False)
    assert folders(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("text", [None, "", '{"perm', "[]", '{"step": 1}'])
def test_a_folder_that_cannot_be_read_is_left_alone(tmp_path: Path, text: str | None) -> None:
    damaged = tmp_path / "checkpoints" / "step_00000000"
    damaged.mkdir(parents=True)
    if text is not None:
        (damaged / "run_state.json").write_text(text)
    run(tmp_path, save_interval=1, keep_checkpoints=1)
    assert folders(tmp_path) == [0, 2, 5, 7, 9, 11, 13, 14]


def test_a_damaged_later_checkpoint_does_not_displace_new_ones(tmp_path: Path) -> None:
    """The run went back behind step 900, whose shards were lost."""
    later = tmp_path / "checkpoints" / "step_00000900"
    later.mkdir(parents=True)
    (later / "run_state.json").write_text('{"permanent": false}')
    run(tmp_path, save_interval=1, keep_checkpoints=1, dies_at=9)
    assert folders(tmp_path) == [2, 5, 7, 8, 9, 900]


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
        "neuron_scale": 0.0,
        "eviction_enabled": True,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "exported": "cr3",
        "due_export": None,
        "permanent": True,
        "architecture": {"family": "llama"},
    }


def timeline(world: World) -> list[tuple[Any, ...]]:
    """What matters to the weights and to readers, without the saves and the progress."""
    kinds = {"train", "evaluate", "hand_over", "export", "alias", "validate"}
    return [event for event in world.events if event[0] in kinds]


def restored(folder: Path, step: int) -> TrainState:
    text = (folder / "checkpoints" / f"step_{step:08d}" / "run_state.json").read_text()
    return TrainState.from_dict(json.loads(text))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_resuming_at_any_step_continues_as_if_uninterrupted(tmp_path: Path, step: int) -> None:
    """Same plans, samples, reset, evaluations and exports as in one go."""
    often = {"save_interval": 1, "keep_checkpoints": 99}
    whole = timeline(run(tmp_path / "whole", **often))
    cut = tmp_path / "cut"
    first = timeline(run(cut, dies_at=step if step < STEPS else "final", **often))
    second = timeline(run(cut, state=restored(cut, step), **often))
    assert first
    assert second
    assert first + second == whole


def test_resuming_after_a_failed_alias_makes_it(tmp_path: Path) -> None:
    stages = only("retrofit", "export")
    run(tmp_path, stages, dies_at="final")
    again = run(tmp_path, stages, restored(tmp_path, 6))
    assert timeline(again) == [("alias", "final", "cr4")]


@pytest.mark.parametrize(("name", "step"), [("cr2", 7), ("cr3", 9), ("cr4", 11)])
def test_a_failed_export_costs_no_step(tmp_path: Path, name: str, step: int) -> None:
    whole = run(tmp_path / "whole").plans
    first = run(tmp_path / "cut", dies_at=name)
    again = run(tmp_path / "cut", state=restored(tmp_path / "cut", step))
    assert first.plans + again.plans == whole
    exported = [made for made, *_ in first.of("export") + again.of("export")]
    assert exported == ["cr2", "cr3", "cr4", "final"]


def test_a_finished_run_does_nothing_when_started_again(tmp_path: Path) -> None:
    run(tmp_path)
    again = run(tmp_path, state=restored(tmp_path, STEPS))
    assert again.events == [("done", name, STEPS) for name in ALL]


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_told_to_stop_saves_that_step_and_continues_from_it(
    tmp_path: Path, step: int
) -> None:
    """Nothing is done twice and nothing is left out, wherever the signal comes."""
    whole = timeline(run(tmp_path / "whole"))
    cut = tmp_path / "cut"
    first = run(cut, stops_at=step)
    assert first.of("stopped") == [(step,)]
    assert len(first.plans) == step
    again = run(cut, state=restored(cut, step))
    assert again.of("stopped") == []
    assert timeline(first) + timeline(again) == whole


def test_a_signal_in_the_last_action_does_not_undo_it(tmp_path: Path) -> None:
    world = run(tmp_path, only("zero_neuron", "export"), stops_at=3)
    assert world.of("stopped") == [(3,)]
    again = run(tmp_path, only("zero_neuron", "export"), restored(tmp_path, 3), stops_at=0)
    assert again.of("stopped") == []
    assert again.of("done") == [("zero_neuron", 3), ("export", 3)]


def test_every_finished_stage_is_announced_after_it_is_saved(tmp_path: Path) -> None:
    world = run(tmp_path)
    assert [name for name, _ in world.of("done")] == list(ALL)
    marks = [e for e in world.events if e[0] in ("done", "save")]
    assert marks.index(("done", "zero_neuron", 5)) > marks.index(("save", "step_00000005", True))
    assert len(world.of("beat")) == STEPS


VALIDATED = only("zero_neuron", "export", "validate")


def test_validation_follows_the_export_and_is_reported(tmp_path: Path) -> None:
    world = run(tmp_path, VALIDATED)
    assert [e[0] for e in timeline(world)][-2:] == ["export", "validate"]
    assert (3, {"tokens": 3 * 128, "export_eval/cr_factor": 2.5}) in world.of("log")
    assert world.of("summary")[-1] == ({"export_eval/cr_factor": 2.5},)


def test_a_run_that_died_in_validation_starts_it_again_and_trains_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, VALIDATED, dies_at="validate")
    assert first.of("validate") == []
    again = run(tmp_path, VALIDATED, restored(tmp_path, 3))
    assert timeline(again) == [("validate",)]
    assert timeline(run(tmp_path, VALIDATED, restored(tmp_path, 3))) == []


def test_reported_rows_name_what_the_stage_measures(tmp_path: Path) -> None:
    rows: dict[int, dict[str, float]] = {}
    for step, values in run(tmp_path).of("log"):
        rows.setdefault(step, {}).update(values)
    assert rows[1]["train/lm"] == 0.75
    assert rows[3]["train/neuron_scale"] == pytest.approx(2 / 3)
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
    assert "train/target_cr" not in rows[3]


def test_the_last_short_interval_of_a_stage_is_reported_too(tmp_path: Path) -> None:
    rows = [(step, set(values)) for step, values in run(tmp_path, log_interval=4).of("log")]
    reported = [step for step, names in rows if "train/loss" in names]
    assert reported == [2, 4, 5, 8, 11, 12, 14]


def test_a_skipped_step_is_counted_and_the_schedules_go_on(tmp_path: Path) -> None:
    world = run(tmp_path, skips={3, 4, 8})
    assert world.plans == run(tmp_path / "other").plans
    rows = {step: values for step, values in world.of("log") if "train/lr" in values}
    assert sorted(rows) == list(range(1, STEPS + 1))
    counted = [rows[step].get("train/skipped_steps", 0) for step in sorted(rows)]
    assert counted == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [step for step, row in rows.items() if "train/loss" not in row] == [4, 5, 9]


def test_the_samples_of_a_skipped_step_are_written_down(tmp_path: Path) -> None:
    world = run(tmp_path, skips={7})
    (file,) = (tmp_path / "skipped").iterdir()
    described = json.loads(file.read_text())
    assert file.name == "step_00000008.json"
    assert described["step"] == 8
    assert described["samples"] == list(range(7 * BATCH, 8 * BATCH))
    assert StepPlan(**described["plan"]) == world.plans[7]
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


def test_a_resumed_run_remembers_the_skipped_steps_before(tmp_path: Path) -> None:
    world = run(tmp_path, skips={6, 7}, dies_at=8, save_interval=1)
    assert world.of("died")
    with pytest.raises(DivergenceError, match=r"step 9: .* skipped step 3 in a row"):
        run(tmp_path, state=restored(tmp_path, 8), skips={8})


def test_a_checkpoint_under_way_is_finished_before_the_run_gives_up(tmp_path: Path) -> None:
    world, waited = World(), []
    world.skips = {6, 7, 8}
    world.finish_save = lambda *, wait: waited.append(wait)  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match="skipped step 3 in a row"):
        loop.run(build_stages(OPTIONS, 0), TrainState(), parts(world, tmp_path))
    assert len(world.plans) == 9
    assert waited[-1]
