"""Metrics that the loop reports, under the same names in every sink.

Events: a stage begins, a step ends, an evaluation ends, a checkpoint is written, a note.
Only the rank that owns the sinks does anything here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.method.plan import StepPlan, StepResult
from dms_train.observe.log import logger
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import Progress
from dms_train.observe.sinks import Sink
from dms_train.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Turns events of the loop into rows, a progress display and log lines.

    Every row has `tokens`, the number of tokens trained on so far, beside the sinks' own `step`.
    """

    sinks: list[Sink]
    progress: Progress
    tokens_per_step: int
    log_interval: int
    throughput: Throughput
    means: Means
    compute: Compute

    def begin_stage(self, name: str, steps: int, finished: int) -> None:
        """Report that a stage starts or continues."""
        self.throughput.pause()
        self.progress.start(name, steps, finished)

    def step(self, state: TrainState, plan: StepPlan, result: StepResult) -> None:
        """Report an optimizer step, skipped or not; `state` is the position after it.

        The sinks get no row inside a branch, because the annealing takes steps of the same numbers.
        """
        rate = self.throughput.step(self.tokens_per_step)
        finite = {} if result.skipped else _described(plan, result)
        values = {**finite, "tokens_per_second": rate}
        self.progress.step(state.stage_step, values)
        if state.branch_start is not None:
            return
        measured = {
            **({} if result.skipped else {"grad_norm": result.grad_norm}),
            "lr": result.learning_rate,
            "memory_gib": result.memory_bytes / 2**30,
            **self.compute.at(rate, has_teacher=plan.token_loss.needs_teacher),
        }
        self.means.add({**values, **measured})
        if state.step % self.log_interval == 0:
            counted = {"skipped_steps": state.skipped_steps} if state.skipped_steps else {}
            self._log(state.step, self.means.take() | counted, "train/")

    def end_stage(self, step: int) -> None:
        """Write the row of the last, shorter interval."""
        row = self.means.take()
        if row:
            self._log(step, row, "train/")

    def evaluation(self, state: TrainState, plan: StepPlan, result: StepResult) -> None:
        """Report an evaluation; that of a branch in one row at the start of the branch."""
        step, values = state.step, _described(plan, result) | {"kv_reads": result.kv_reads}
        if state.branch_start is not None:
            prefix = f"branch/cr{round(plan.target_cr)}/"
            self.measured(state.branch_start, values, prefix)
            return
        held = {"kept": result.kept, "kept_layers": result.kept_layers} if result.kept else {}
        self._log(step, {**values, **held}, "eval/")
        for sink in self.sinks:
            sink.summary({f"eval/{name}": value for name, value in values.items()})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger().info("step %d evaluation: %s", step, shown)
        self.throughput.pause()

    def measured(self, step: int, values: dict[str, float], prefix: str) -> None:
        """Report measurements of the export; their names begin with `prefix`."""
        self._log(step, values, prefix)
        for sink in self.sinks:
            sink.summary({f"{prefix}{name}": value for name, value in values.items()})
        self.throughput.pause()

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """Report a complete checkpoint, for which training waited `seconds`."""
        self._log(step, {"checkpoint_seconds": seconds}, "train/")
        logger().info("step %d saved %s, %.1f s", step, path, seconds)
        self.throughput.pause()

    def save_failed(self, step: int, failures: int, why: str) -> None:
        """Report the `failures`-th checkpoint that could not be written; training continues."""
        self._log(step, {"failed_checkpoints": failures}, "train/")
        logger().warning("step %d: training continues without %s", step, why)
        self.throughput.pause()

    def note(self, text: str) -> None:
        """Log a line."""
        logger().info(text)
        self.throughput.pause()

    def timed(self, action: Callable[[], None]) -> float:
        """Run `action` and return the seconds it took."""
        begin = time.monotonic()
        action()
        return time.monotonic() - begin

    def close(self) -> None:
        """Finish the display and the sinks."""
        self.progress.close()
        for sink in self.sinks:
            sink.close()

    def _log(self, step: int, values: Mapping[str, Any], prefix: str) -> None:
        row = {prefix + name: value for name, value in values.items()}
        for sink in self.sinks:
            sink.log(step, {"tokens": step * self.tokens_per_step, **row})


def _described(plan: StepPlan, result: StepResult) -> dict[str, float]:
    """Select the values of a step or evaluation that its plan defines."""
    values = {"loss": result.loss, **result.terms}
    if plan.eviction != "none":
        values |= {
            "aux_loss": result.aux_loss,
            "alpha": result.alpha,
            "target_cr": plan.target_cr,
            "cr": result.cr_factor,
        }
    elif plan.channel_scale != 1.0:
        values["channel_scale"] = plan.channel_scale
    return values
