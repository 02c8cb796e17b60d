"""The training loop: runs stages over an engine, saves, evaluates, exports and measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dms_train.method.plan import StepPlan, StepResult
from dms_train.training.engine import (
    Evaluator,
    Exporter,
    TokenSource,
    TrainEngine,
    Validator,
    Watch,
)
from dms_train.training.errors import DivergenceError
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.stages import Action, Stage
from dms_train.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The objects and settings of a loop.

    Attributes:
        global_batch_size: Samples per optimizer step.
        eval_batches: This rank's microbatches of one evaluation; empty to evaluate nothing.
    """

    engine: TrainEngine
    source: TokenSource
    exporter: Exporter
    validator: Validator
    evaluator: Evaluator
    reporter: Reporter
    watch: Watch
    saver: Saver
    skips: SkipRecord
    options: RunOptions
    global_batch_size: int
    eval_batches: list[Any]
    every_integer_cr: bool


def run(stages: list[Stage | Action], state: TrainState, parts: LoopParts) -> TrainState:
    """Run the stages from the position in `state` on.

    Returns the position at the end. That is before the last stage, with everything saved, when the
    watch reports that the run must stop.
    """
    for stage in stages[: state.stage]:
        # the run may have been killed after saving and before it marked the stage as done
        parts.watch.done(_name(stage), state.step)
    _export_due(state, parts)
    while state.stage < len(stages):
        stage, before = stages[state.stage], state.stage
        if isinstance(stage, Stage):
            stops = _run_stage(stage, state, parts)
        else:
            _act(stage, state, parts)
            stops = parts.watch.must_stop()
        if state.stage > before:
            parts.watch.done(_name(stage), state.step)
        if stops and state.stage < len(stages):
            parts.watch.stopped(state.step)
            break
    return state


def _name(stage: Stage | Action) -> str:
    return stage.name if isinstance(stage, Stage) else stage


def _act(action: Action, state: TrainState, parts: LoopParts) -> None:
    parts.engine.end_training()
    if action == "export":
        _export_final(state, parts)
    elif action == "validate_export":
        parts.reporter.measured(state.step, parts.validator.validate(), f"{action}/")
    else:
        parts.reporter.measured(state.step, parts.evaluator.evaluate_tasks(), f"{action}/")
    state.next_stage()
    parts.saver.annotate(state, state.to_dict())


def _run_stage(stage: Stage, state: TrainState, parts: LoopParts) -> bool:
    """Run the rest of a stage and leave `state` at the start of the next one.

    Returns:
        Whether the run must stop; `state` then is where the newest checkpoint is.
    """
    if stage.requires_eviction and not state.eviction_enabled:
        _enable_eviction(stage, state, parts)
    parts.engine.begin_stage(stage.rate)
    parts.reporter.begin_stage(stage.name, stage.steps, state.stage_step)
    stops = False
    for done in range(state.stage_step + 1, stage.steps + 1):
        _step(stage, state, parts)
        ends = done == stage.steps
        if _due(state.step, parts.options.eval_interval) or ends:
            evaluate(stage.eval_plan(state.step, done), state, parts)
        ratio = stage.integer_passed(done) if parts.every_integer_cr else None
        state.due_export = None if ratio is None else f"cr{ratio}"
        stops = parts.watch.must_stop()
        if ends:
            _finish(stage, state, parts)
        elif stops or ratio is not None or _due(state.step, parts.options.save_interval):
            exports = ratio is not None
            parts.saver.save(state, permanent=exports, required=stops, wait=exports)
        else:
            parts.saver.poll(state.step)
        if stops and not ends:
            parts.reporter.end_stage(state.step)
            return True  # an export that is due is written when the run resumes
        # after saving, so that a failed export loses no step
        _export_due(state, parts)
    if stage.steps == 0:
        _finish(stage, state, parts)
    return stops


def _step(stage: Stage, state: TrainState, parts: LoopParts) -> None:
    plan = stage.plan(state.step, state.stage_step)
    with parts.watch.phase("data"):
        batches = parts.source.microbatches(state.consumed_samples)
    samples = range(state.consumed_samples, state.consumed_samples + parts.global_batch_size)

    def read_ahead() -> None:
        with parts.watch.phase("data"):
            parts.source.read_ahead(samples.stop)

    with parts.watch.phase("step"):
        result = parts.engine.train_step(plan, batches, read_ahead)
    state.advance(parts.global_batch_size)
    with _checkpoint_kept(state, parts):
        parts.skips.count(plan, result, state, samples)
    state.neuron_scale = plan.neuron_scale
    if stage.requires_eviction:
        state.target_cr = plan.target_cr
    parts.reporter.step(state, plan, result)
    parts.watch.beat(state.step)


@contextmanager
def _checkpoint_kept(state: TrainState, parts: LoopParts) -> Iterator[None]:
    """Complete a checkpoint that is being written when the block ends the run."""
    try:
        yield
    except DivergenceError:
        parts.saver.settle(state.step)
        raise


def _finish(stage: Stage, state: TrainState, parts: LoopParts) -> None:
    with _checkpoint_kept(state, parts):
        parts.skips.require_update(stage.name, stage.steps, state)
    if stage.enables_eviction and not state.eviction_enabled:
        _enable_eviction(stage, state, parts)
    state.next_stage()
    parts.reporter.end_stage(state.step)
    parts.saver.save(state, permanent=True, required=True)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _enable_eviction(stage: Stage, state: TrainState, parts: LoopParts) -> None:
    if stage.resets_eviction_channel:
        parts.engine.reset_eviction_channel()
    state.eviction_enabled = True
    state.exported = None


def evaluate(plan: StepPlan, state: TrainState, parts: LoopParts) -> StepResult | None:
    """Evaluate and report; None when there is nothing to evaluate on."""
    if not parts.eval_batches:
        return None
    with parts.watch.phase("step"):
        result = parts.engine.evaluate(plan, parts.eval_batches)
    parts.reporter.evaluation(state.step, plan, result)
    return result


def _export_due(state: TrainState, parts: LoopParts) -> None:
    """Write the export that is due since the last checkpoint."""
    if state.due_export is None:
        return
    _export(state.due_export, state, parts)
    state.due_export = None
    parts.saver.annotate(state, {"exported": state.exported, "due_export": None})


def _export_final(state: TrainState, parts: LoopParts) -> None:
    if state.exported is None:
        _export("final", state, parts)
    elif state.exported != "final":
        parts.exporter.alias("final", state.exported)


def _export(name: str, state: TrainState, parts: LoopParts) -> None:
    path = parts.exporter.export(name, state.to_dict())
    state.exported = name
    parts.reporter.note(f"exported {path}")
