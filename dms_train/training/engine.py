"""Protocols of the objects that the loop works with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from dms_train.method.plan import LearningRate, StepPlan, StepResult


class TrainEngine(Protocol):
    """Computes steps, whatever their stage."""

    def end_training(self) -> None:
        """Free the memory that only training steps use; further steps may follow."""
        ...

    def begin_stage(self, rate: LearningRate) -> None:
        """Set the learning-rate schedule of the coming steps."""
        ...

    def train_step(
        self, plan: StepPlan, batches: list[Any], meanwhile: Callable[[], None]
    ) -> StepResult:
        """One optimizer step; a skipped one, on every rank, when it would not be finite.

        It calls `meanwhile`, work for the host, before it waits for the device.
        """
        ...

    def evaluate(self, plan: StepPlan, batches: list[Any]) -> StepResult:
        """Losses and accounting without gradients."""
        ...

    def reset_eviction_channel(self) -> None:
        """Zero the borrowed neuron's projection and its optimizer state."""
        ...

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        """Write weights, optimizer and the JSON state, in the background unless `wait` is set.

        Raises:
            ValueError: It cannot be written; the same on every rank.
        """
        ...

    def finish_save(self, *, wait: bool) -> Path | None:
        """The checkpoint whose writing has ended, or has to end now; None when there is none.

        Raises:
            ValueError: It could not be written; the same on every rank.
        """
        ...

    def annotate(self, path: Path, state: dict[str, Any]) -> None:
        """Change values in the JSON state of a checkpoint, if there is one at `path`."""
        ...


class TokenSource(Protocol):
    """Numbered samples, cut into this rank's microbatches."""

    def read_ahead(self, first_sample: int) -> None:
        """Prepare for a call of `microbatches`, which reports errors."""
        ...

    def microbatches(self, first_sample: int) -> list[Any]:
        """The microbatches of the global batch that starts at this sample."""
        ...


class Validator(Protocol):
    """Evaluates the final export; every rank calls it."""

    def validate(self) -> dict[str, float]:
        """Measure, write the report and return flat numbers on rank 0, none elsewhere.

        Raises:
            ValueError: The export fails its self-test; the report is written nevertheless.
        """
        ...


class Evaluator(Protocol):
    """Evaluates the final export on tasks; every rank calls it."""

    def evaluate_tasks(self) -> dict[str, float]:
        """Measure, store the results and return flat numbers.

        Raises:
            ValueError: It was refused; the same on every rank.
        """
        ...


class Watch(Protocol):
    """Connects the loop with its launcher: heartbeats, requests to stop, finished stages."""

    def phase(self, name: Literal["data", "step"]) -> AbstractContextManager[None]:
        """Meanwhile the loop reads data, or computes a step; both have a time limit."""
        ...

    def beat(self, step: int) -> None:
        """Step `step` was taken."""
        ...

    def must_stop(self) -> bool:
        """Whether any rank was signalled to stop; a collective with the same result everywhere."""
        ...

    def stopped(self, step: int) -> None:
        """The loop saved step `step` and returns before its stages are finished."""
        ...

    def done(self, stage: str, step: int) -> None:
        """A stage is finished and its results are stored."""
        ...


class Exporter(Protocol):
    """Writes exports of the current model."""

    def export(self, name: str, state: dict[str, Any]) -> Path:
        """Write `exports/NAME` and return its folder."""
        ...

    def alias(self, name: str, target: str) -> None:
        """Make `exports/NAME` a link to an existing export."""
        ...
