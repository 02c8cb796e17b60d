"""The training loop: runs stages over an engine, saves, evaluates, exports and measures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dms_train.method.plan import StepPlan, StepResult
from dms_train.training.engine import (
    Evaluator,
    Exporter,
    TeacherStore,
    TokenSource,
    TrainEngine,
    Validator,
    Watch,
)
from dms_train.training.errors import DivergenceError, KLLimitError
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.stages import Action, RetrofitStage, Stage
from dms_train.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerComponents:
    """Objects and settings of the training loop.

    Attributes:
        global_batch_size: Samples per optimizer step.
        eval_batches: This rank's micro-batches of one evaluation; empty to evaluate nothing.
    """

    engine: TrainEngine
    source: TokenSource
    exporter: Exporter
    validator: Validator
    evaluator: Evaluator
    teacher_pass: TeacherStore
    reporter: Reporter
    watch: Watch
    saver: Saver
    skips: SkipRecord
    options: RunOptions
    global_batch_size: int
    eval_batches: list[Any]
    every_integer_cr: bool


def run(
    stages: list[Stage | Action], state: TrainState, components: TrainerComponents
) -> TrainState:
    """Run the stages, starting from the position in `state`, and return the final position.

    When the watch reports that the run must stop, everything is saved and the final position is
    before the end of the last stage.
    """
    components.saver.remove_old(state)  # a killed run may have left them
    for stage in stages[: state.stage]:
        # the run may have been killed after saving and before it marked the stage as done
        components.watch.done(_name(stage), state.step)
    _export_due(state, components)
    while state.stage < len(stages):
        stage, before = stages[state.stage], state.stage
        if isinstance(stage, RetrofitStage) and state.early_stop is not None:
            stage = stage.held_at(state.target_cr)
        if isinstance(stage, Stage):
            _keep_weights(stages, state, components)
            stops = _run_stage(stage, state, components)
        else:
            _act(stage, state, components)
            stops = components.watch.must_stop()
        if state.stage > before:
            components.watch.done(_name(stage), state.step)
        if stops and state.stage < len(stages):
            components.watch.stopped(state.step)
            break
    return state


def _keep_weights(
    stages: list[Stage | Action], state: TrainState, components: TrainerComponents
) -> None:
    """Keep the weights of the stage that has just ended, unless an export holds them.

    Its checkpoint is deleted when newer ones exist.
    """
    ended = stages[state.stage - 1] if state.stage else None
    if isinstance(ended, Stage) and state.stage_step == 0 and state.exported is None:
        components.saver.save_weights(state, ended.name)


def _name(stage: Stage | Action) -> str:
    return stage.name if isinstance(stage, Stage) else stage


def _act(action: Action, state: TrainState, components: TrainerComponents) -> None:
    components.engine.end_training()
    if action == "teacher_logits":
        if not components.teacher_pass.store(components.watch):
            return
    elif action == "export":
        _export_final(state, components)
    elif action == "validate_export":
        numbers = components.validator.validate()
        components.reporter.measured(state.step, numbers, f"{action}/")
    else:
        numbers = components.evaluator.evaluate_tasks()
        components.reporter.measured(state.step, numbers, f"{action}/")
    state.next_stage()
    components.saver.annotate(state, state.to_dict())


def _run_stage(stage: Stage, state: TrainState, components: TrainerComponents) -> bool:
    """Run the rest of a stage and leave `state` at the start of the next one.

    Returns:
        Whether the run must stop; `state` is then the position of the newest checkpoint.
    """
    if stage.requires_eviction and not state.eviction_enabled:
        _enable_eviction(stage, state, components)
    if state.branch_start is not None and _run_branch(stage, state, components):
        return True
    _begin(stage, state, components)
    stops = False
    for stage_step in range(state.stage_step + 1, stage.steps + 1):
        _step(stage, state, components)
        ends = _measure(stage, stage_step, state, components)
        _plan_export(stage, stage_step, state, components)
        stops = components.watch.must_stop()
        if ends:
            _finish(stage, state, components)
        else:
            _save(state, components, stops=stops)
        if stops and not ends:
            components.reporter.end_stage(state.step)
            return True  # the resumed run writes the due export
        # after saving, so that a failed export or branch loses no step
        _export_due(state, components)
        if ends:
            break
        if state.branch_start is not None:
            if _run_branch(stage, state, components):
                return True
            _begin(stage, state, components)
    if stage.steps == 0:
        _finish(stage, state, components)
    return stops


def _begin(stage: Stage, state: TrainState, components: TrainerComponents) -> None:
    components.engine.begin_stage(stage.rate)
    components.reporter.begin_stage(stage.name, stage.steps, state.stage_step)


def _measure(
    stage: Stage, stage_step: int, state: TrainState, components: TrainerComponents
) -> bool:
    """Evaluate after a step if that is due, and return whether the step is the last of its stage.

    Where the KL is above the limit of the stage, the step is the last, and weights and optimizer
    are those of the last ratio within the limit again.
    """
    ends = stage_step == stage.steps
    limited = stage.max_kl is not None and (ends or stage.integer_passed(stage_step) is not None)
    if not (ends or limited or _due(state.step, components.options.eval_interval)):
        return False
    result = evaluate(stage.eval_plan(state.step, stage_step), state, components)
    if stage.max_kl is None or not limited:
        return ends
    assert result is not None  # planning.check requires validation samples
    if not result.terms["kl"] <= stage.max_kl:
        _return_to_kept(stage.max_kl, result.terms["kl"], state, components)
        return True
    state.kept_step = state.step
    return ends


def _return_to_kept(
    max_kl: float, kl: float, state: TrainState, components: TrainerComponents
) -> None:
    """Load the last ratio whose KL was within the limit. The counts of steps and samples go on.

    Raises:
        KLLimitError: There is no such ratio.
    """
    saver, reached = components.saver, state.target_cr
    saver.finish_pending_save(state.step)
    above = (
        f"stage.retrofit.max_kl={max_kl:g}: the validation KL is {kl:.4g} nats per token at "
        f"compression ratio {reached:g}"
    )
    if state.kept_step is None:
        raise KLLimitError(
            f"{above}, the first that was measured; raise max_kl or stage.retrofit.steps_per_cr in "
            "another run.dir"
        )
    loaded = components.engine.load(saver.step_path(state.kept_step), with_optimizer=True)
    state.target_cr = TrainState.from_dict(loaded).target_cr
    state.exported = None  # the final export states the early stop
    measured = {"max_kl": max_kl, "cr": reached, "kl": kl, "kept_cr": state.target_cr}
    state.early_stop = {**measured, "kl": kl if math.isfinite(kl) else None}
    components.reporter.measured(state.step, measured, "early_stop/")
    components.reporter.note(f"{above}; the run continues from ratio {state.target_cr:g}")


def _plan_export(
    stage: Stage, stage_step: int, state: TrainState, components: TrainerComponents
) -> None:
    """Record in the position which export or branch follows from these weights."""
    state.due_export = None
    ratio = None if state.early_stop else stage.integer_passed(stage_step)
    if ratio in stage.branches and stage_step < stage.steps:
        state.branch_start = state.step
    elif ratio is not None and components.every_integer_cr:
        state.due_export = f"cr{ratio}"


def _save(state: TrainState, components: TrainerComponents, *, stops: bool) -> None:
    """Save a position inside a stage if it is due, or if the stage may return to it."""
    returns = state.branch_start is not None or state.kept_step == state.step
    waits = state.due_export is not None or returns
    if stops or waits or _due(state.step, components.options.save_interval):
        components.saver.save(state, required=stops or returns, wait=waits)
    else:
        components.saver.poll(state.step)


def _run_branch(stage: Stage, state: TrainState, components: TrainerComponents) -> bool:
    """Hold the ratio that was just reached, export the result, and return to the annealing.

    Weights, optimizer and data position are those of the annealing again. The checkpoint of the
    branch's start holds them.

    Returns:
        Whether the run must stop; `state` is then the position of the newest checkpoint.
    """
    start, ratio = state.branch_start, int(state.target_cr)
    assert start is not None
    branch, name = stage.branches[ratio], f"cr{ratio}"
    if state.step == start:
        state.stage_step = 0
        components.reporter.end_stage(start)
    components.engine.begin_stage(branch.rate)
    components.reporter.begin_stage(f"{branch.name} {name}", branch.steps, state.stage_step)
    while state.stage_step < branch.steps:
        _step(branch, state, components)
        stops, ends = components.watch.must_stop(), state.stage_step == branch.steps
        if ends or stops or _due(state.step, components.options.save_interval):
            components.saver.save(state, required=ends or stops)
        else:
            components.saver.poll(start)
        if stops:
            return True  # the resumed run writes the export
    components.saver.finish_pending_save(start)
    components.skips.require_update(branch.name, branch.steps, state)
    evaluate(branch.eval_plan(state.step, state.stage_step), state, components)
    _export(name, state, components)
    _end_branch(start, state, components)
    return components.watch.must_stop()


def _end_branch(start: int, state: TrainState, components: TrainerComponents) -> None:
    """Load the annealing again, then delete the checkpoints of the branch."""
    saver = components.saver
    state.end_branch(components.engine.load(saver.step_path(start), with_optimizer=True))
    saver.annotate(state, {"branch_start": None})
    saver.remove_branch(state)


def _step(stage: Stage, state: TrainState, components: TrainerComponents) -> None:
    plan = stage.plan(state.step, state.stage_step)
    with components.watch.phase("data"):
        batches = components.source.microbatches(state.consumed_samples)
    samples = range(state.consumed_samples, state.consumed_samples + components.global_batch_size)

    def read_ahead() -> None:
        with components.watch.phase("data"):
            components.source.read_ahead(samples.stop)

    with components.watch.phase("step"):
        result = components.engine.train_step(plan, batches, read_ahead)
    state.advance(components.global_batch_size)
    with _checkpoint_kept(state, components):
        components.skips.count(plan, result, state, samples)
    state.channel_scale = plan.channel_scale
    if stage.requires_eviction:
        state.target_cr = plan.target_cr
    components.reporter.step(state, plan, result)
    components.watch.beat(state.step)


@contextmanager
def _checkpoint_kept(state: TrainState, components: TrainerComponents) -> Iterator[None]:
    """Complete a checkpoint that is being written when the block ends the run."""
    try:
        yield
    except DivergenceError:
        components.saver.finish_pending_save(state.step)
        raise


def _finish(stage: Stage, state: TrainState, components: TrainerComponents) -> None:
    with _checkpoint_kept(state, components):
        components.skips.require_update(stage.name, stage.steps, state)
    if stage.enables_eviction and not state.eviction_enabled:
        _enable_eviction(stage, state, components)
    state.kept_step = None
    state.next_stage()
    components.reporter.end_stage(state.step)
    components.saver.save(state, required=True)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _enable_eviction(stage: Stage, state: TrainState, components: TrainerComponents) -> None:
    if stage.resets_eviction_channel:
        components.engine.reset_eviction_channel()
    state.eviction_enabled = True
    state.exported = None


def evaluate(plan: StepPlan, state: TrainState, components: TrainerComponents) -> StepResult | None:
    """Evaluate and report; None when there is nothing to evaluate on."""
    if not components.eval_batches:
        return None
    with components.watch.phase("step"):
        result = components.engine.evaluate(plan, components.eval_batches)
    components.reporter.evaluation(state, plan, result)
    return result


def _export_due(state: TrainState, components: TrainerComponents) -> None:
    """Write the export that is due since the last checkpoint."""
    if state.due_export is None:
        return
    _export(state.due_export, state, components)
    state.due_export = None
    components.saver.annotate(state, {"exported": state.exported, "due_export": None})


def _export_final(state: TrainState, components: TrainerComponents) -> None:
    if state.exported is None:
        _export("final", state, components)
    elif state.exported != "final":
        components.exporter.alias("final", state.exported)


def _export(name: str, state: TrainState, components: TrainerComponents) -> None:
    path = components.exporter.export(name, state.to_dict())
    state.exported = name
    components.reporter.note(f"exported {path}")
