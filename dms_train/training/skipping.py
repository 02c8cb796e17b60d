"""Record skipped steps, and end a run with too many of them.

The engine does not update weights and optimizer when the loss or the norm of the gradients is not
finite. The schedules advance, because they are functions of the step. The samples and the plan of
the step are written to `skipped/step_*.json`; `cli/replay.py` computes the step again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from dms_train.method.plan import StepPlan, StepResult
from dms_train.observe.log import logger
from dms_train.training.errors import DivergenceError
from dms_train.training.state import TrainState

# A run keeps its learning rate, so it cannot be resumed with another one.
_START_AGAIN = "Lower optim.lr in another run.dir; run.load starts it from a checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRecord:
    """Counts skipped steps; every rank calls it with the same numbers.

    Attributes:
        folder: Folder of the records.
        max_consecutive: Number of skipped steps in a row that ends the run.
        is_main_rank: Whether this process writes.
    """

    folder: Path
    max_consecutive: int
    is_main_rank: bool

    def count(self, plan: StepPlan, result: StepResult, state: TrainState, samples: range) -> None:
        """Record a step that has ended; `state` is the position after it.

        Raises:
            DivergenceError: The step was the last of `max_consecutive` skipped steps in a row.
        """
        if not result.skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        reason = _reason(result)
        file = self.folder / f"step_{state.step:08d}.json"
        if self.is_main_rank:
            try:
                self._write(file, plan, result, state, samples)
            except OSError as error:  # training continues without the record
                logger().warning("%s: cannot be written (%s)", file, error.strerror)
        if state.skipped_in_a_row >= self.max_consecutive:
            raise DivergenceError(
                f"step {state.step}: {reason}, skipped step {state.skipped_in_a_row} in a row "
                f"({self.folder} names the samples); the checkpoints are untouched. {_START_AGAIN}"
            )
        if self.is_main_rank:
            logger().warning("step %d skipped: %s; its samples are in %s", state.step, reason, file)

    def require_update(self, stage: str, steps: int, state: TrainState) -> None:
        """Check at the end of a stage that one of its steps changed the weights.

        Raises:
            DivergenceError: All of them were skipped, although they are fewer than
                `max_consecutive`.
        """
        if 0 < steps <= state.skipped_in_a_row:
            raise DivergenceError(
                f"{stage}: all {steps} steps were skipped, loss or gradient norm was not finite "
                f"({self.folder} names the samples); nothing was trained. {_START_AGAIN}"
            )

    def _write(
        self, file: Path, plan: StepPlan, result: StepResult, state: TrainState, samples: range
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        described = {
            "step": state.step,
            "stage": state.stage,
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
            "samples": list(samples),
            "skipped_in_a_row": state.skipped_in_a_row,
            "plan": asdict(plan),
        }
        file.write_text(json.dumps(described, indent=1) + "\n")


def _reason(result: StepResult) -> str:
    if math.isfinite(result.loss):
        return f"the gradient norm is {result.grad_norm}"
    return f"loss is {result.loss}"
