"""The one loop: runs stages over an engine, saves, evaluates and exports on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.method.plan import StepPlan, StepResult
from dms_train.training.engine import Exporter, TokenSource, TrainEngine
from dms_train.training.options import RunOptions
from dms_train.training.reporting import Reporter
from dms_train.training.stages import RetrofitStage, Stage
from dms_train.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop works with.

    Attributes:
        checkpoints: Folder of the run's checkpoints.
        leads: Whether this process removes old checkpoints.
        global_batch_size: Samples per optimizer step.
        eval_batches: This rank's microbatches of one evaluation; empty to evaluate nothing.
        provenance: Stored with every checkpoint.
    """

    engine: TrainEngine
    source: TokenSource
    exporter: Exporter
    reporter: Reporter
    options: RunOptions
    checkpoints: Path
    leads: bool
    global_batch_size: int
    eval_batches: list[Any]
    every_integer_cr: bool
    provenance: dict[str, Any]


def run(stages: list[Stage | None], state: TrainState, parts: LoopParts) -> TrainState:
    """Run what is left of the stages; `state` says where to begin."""
    while state.stage < len(stages):
        stage = stages[state.stage]
        if stage is None:
            _export_final(state, parts)
        else:
            _run_stage(stage, state, parts)
        state.next_stage()
        if stage is not None:
            _save(state, parts, permanent=True)
    return state


def _run_stage(stage: Stage, state: TrainState, parts: LoopParts) -> None:
    engine, options = parts.engine, parts.options
    if stage.borrows_lane and not state.lane_borrowed:
        _hand_over(state, parts)
    engine.begin_stage(stage.rate)
    parts.reporter.begin_stage(stage.name, stage.steps, state.stage_step)
    while state.stage_step < stage.steps:
        plan = stage.plan(state.step, state.stage_step)
        result = engine.train_step(plan, parts.source.microbatches(state.consumed_samples))
        state.advance(parts.global_batch_size)
        state.target_cr = plan.target_cr if stage.borrows_lane else state.target_cr
        parts.reporter.step(state.step, state.stage_step, plan, result)
        ends = state.stage_step == stage.steps
        if _due(state.step, options.eval_interval) or ends:
            evaluate(stage.eval_plan(state.step, state.stage_step), state, parts)
        _export_integer(stage, state, parts)
        if _due(state.step, options.save_interval) and not ends:
            _save(state, parts, permanent=False)
    if stage.hands_over and not state.lane_borrowed:
        _hand_over(state, parts)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _hand_over(state: TrainState, parts: LoopParts) -> None:
    parts.engine.hand_over_lane()
    state.lane_borrowed = True
    state.exported = None


def evaluate(plan: StepPlan, state: TrainState, parts: LoopParts) -> StepResult | None:
    """Evaluate and report; None when there is nothing to evaluate on."""
    if not parts.eval_batches:
        return None
    result = parts.engine.evaluate(plan, parts.eval_batches)
    parts.reporter.evaluation(state.step, plan, result)
    return result


def _export_integer(stage: Stage, state: TrainState, parts: LoopParts) -> None:
    if not (parts.every_integer_cr and isinstance(stage, RetrofitStage)):
        return
    ratio = stage.integer_passed(state.stage_step)
    if ratio is not None:
        _export(f"cr{ratio}", state, parts)


def _export_final(state: TrainState, parts: LoopParts) -> None:
    if state.exported is None:
        _export("final", state, parts)
    elif state.exported != "final":
        parts.exporter.alias("final", state.exported)


def _export(name: str, state: TrainState, parts: LoopParts) -> None:
    path = parts.exporter.export(name, state.to_dict())
    state.exported = name
    parts.reporter.note(f"exported {path}")


def _save(state: TrainState, parts: LoopParts, *, permanent: bool) -> None:
    path = parts.checkpoints / f"step_{state.step:08d}"
    described = {**state.to_dict(), "permanent": permanent, **parts.provenance}
    seconds = parts.reporter.timed(lambda: parts.engine.save(path, described))
    parts.reporter.saved(state.step, path, seconds)
    if parts.leads:
        remove_old(parts.checkpoints, parts.options.keep_checkpoints, _is_permanent)


def _is_permanent(path: Path) -> bool:
    import json

    return bool(json.loads((path / "run_state.json").read_text()).get("permanent"))


def remove_old(folder: Path, keep: int, is_permanent: Callable[[Path], bool]) -> list[Path]:
    """Delete all but the newest `keep` temporary checkpoints; returns what was deleted."""
    temporary = [p for p in sorted(folder.glob("step_????????")) if not is_permanent(p)]
    old = temporary[: max(0, len(temporary) - keep)]
    for path in old:
        shutil.rmtree(path)
    return old
