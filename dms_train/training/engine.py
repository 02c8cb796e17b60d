"""Protocols of the objects that the training loop calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from dms_train.method.plan import LearningRate, StepPlan, StepResult


class TrainEngine(Protocol):
    """Computes the steps of every stage."""

    def end_training(self) -> None:
        """Free the memory that only training steps use; further steps may follow."""
        ...

    def begin_stage(self, rate: LearningRate) -> None:
        """Set the learning-rate schedule of the coming steps."""
        ...

    def train_step(
        self, plan: StepPlan, batches: list[Any], meanwhile: Callable[[], None]
    ) -> StepResult:
        """Take one optimizer step; skip it, on every rank, when it would not be finite.

        The host calls `meanwhile` before it waits for the device.
        """
        ...

    def evaluate(self, plan: StepPlan, batches: list[Any]) -> StepResult:
        """Compute losses and accounting without gradients."""
        ...

    def reset_eviction_channel(self) -> None:
        """Zero the projection of the eviction channel and its optimizer state."""
        ...

    def save(self, path: Path, state: dict[str, Any], *, wait: bool) -> None:
        """Write weights, optimizer and the JSON state, in the background unless `wait` is set.

        Raises:
            ValueError: The checkpoint cannot be written; the same on every rank.
        """
        ...

    def save_weights(self, path: Path, state: dict[str, Any]) -> None:
        """Write the weights and the JSON state, without the optimizer; ValueError as `save`."""
        ...

    def load(self, path: Path, *, with_optimizer: bool) -> dict[str, Any]:
        """Load weights, and the optimizer if wanted, and return the JSON state.

        Raises:
            ValueError: The checkpoint cannot be read; the same on every rank.
        """
        ...

    def finish_save(self, *, wait: bool) -> Path | None:
        """Return a checkpoint whose writing has ended, or must end now; None without one.

        Raises:
            ValueError: The checkpoint could not be written; the same on every rank.
        """
        ...

    def annotate(self, path: Path, state: dict[str, Any]) -> None:
        """Change values in the JSON state of a checkpoint, if there is one at `path`."""
        ...


class TokenSource(Protocol):
    """Numbered samples, cut into this rank's micro-batches."""

    def read_ahead(self, first_sample: int) -> None:
        """Prepare for a call of `microbatches`, which reports errors."""
        ...

    def microbatches(self, first_sample: int) -> list[Any]:
        """Return the micro-batches of the global batch that starts at this sample."""
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
            ValueError: A task or the export was refused; the same on every rank.
        """
        ...


class TeacherStore(Protocol):
    """Stores the teacher's distributions for later runs; every rank calls it."""

    def store(self, watch: Watch) -> bool:
        """Store what is missing; return False if the run must stop before that.

        Raises:
            ValueError: The folder holds other files, or a file cannot be written.
        """
        ...


class Watch(Protocol):
    """Connects the loop with its launcher: heartbeats, requests to stop, finished stages."""

    def phase(self, name: Literal["data", "step"]) -> AbstractContextManager[None]:
        """Limit the time of the block, which reads data or computes a step."""
        ...

    def beat(self, step: int) -> None:
        """Record that step `step` was taken."""
        ...

    def must_stop(self) -> bool:
        """Return whether any rank was signalled to stop; a collective, the same on all ranks."""
        ...

    def stopped(self, step: int) -> None:
        """Record that the loop saved step `step` and returns before its stages are finished."""
        ...

    def done(self, stage: str, step: int) -> None:
        """Record that a stage is finished and its results are stored."""
        ...


class Exporter(Protocol):
    """Writes exports of the current model."""

    def export(self, name: str, state: dict[str, Any]) -> Path:
        """Write `exports/NAME` and return its folder."""
        ...

    def alias(self, name: str, target: str) -> None:
        """Make `exports/NAME` a link to an existing export."""
        ...
