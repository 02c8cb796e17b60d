"""Position of a run, which a resumed run needs besides weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

# Keys of checkpoints of earlier versions, and the fields that replaced them.
_RENAMED = {"neuron_scale": "channel_scale"}


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Position of a run; plain JSON.

    Attributes:
        stage: Index of the current stage in `stage.run`.
        stage_step: Number of finished steps in the current stage.
        step: Number of finished steps in all stages.
        consumed_samples: Position in the data.
        loaded_cr: Compression ratio of the student the run began with.
        target_cr: Compression ratio of the last retrofit step.
        channel_scale: Factor on the eviction channel in the last step; 1 is the original model.
        eviction_enabled: Whether the eviction channel makes decisions.
        skipped_steps: Number of steps without an update, because loss or gradient was not finite.
        skipped_in_a_row: Number of consecutive skipped steps up to the latest step.
        exported: Name of the export that holds the current weights, if one does.
        due_export: Name of the export that still has to be written from these weights.
        branch_start: Number of finished steps when the current hold branch left the annealing; None
            outside a branch. The checkpoint of that step holds the annealing.
        kept_step: Number of finished steps at the last ratio whose KL was within the limit; None
            without a limit or such a ratio. The checkpoint of that step is kept.
        early_stop: Record of an annealing that ended at its KL limit: `max_kl`, the `kl` that was
            above it (None if it was not finite) and its ratio `cr`, and `kept_cr`, the ratio that
            the run continues from.
    """

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    consumed_samples: int = 0
    loaded_cr: float = 1.0
    target_cr: float = 1.0
    channel_scale: float = 1.0
    eviction_enabled: bool = False
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    exported: str | None = None
    due_export: str | None = None
    branch_start: int | None = None
    kept_step: int | None = None
    early_stop: dict[str, float | None] | None = None

    def advance(self, samples: int) -> None:
        """Count one optimizer step."""
        self.stage_step += 1
        self.step += 1
        self.consumed_samples += samples
        self.exported = None

    def end_branch(self, start: dict[str, Any]) -> None:
        """Return to the annealing; `start` is the stored position that the branch left."""
        before = TrainState.from_dict(start)
        for item in fields(self):
            setattr(self, item.name, getattr(before, item.name))
        self.branch_start = None

    def next_stage(self) -> None:
        """Move to the start of the following stage."""
        self.stage += 1
        self.stage_step = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Build it from the state in a checkpoint of any version; other keys are ignored."""
        current = {_RENAMED.get(key, key): value for key, value in values.items()}
        return cls(**{f.name: current[f.name] for f in fields(cls) if f.name in current})


def describe_early_stop(early_stop: Mapping[str, float | None]) -> str:
    """Describe an early stop (`TrainState.early_stop`) in one sentence."""
    measured = (
        "at ratio {cr:g} was not a finite number (limit {max_kl:.4g} nats/token)"
        if early_stop["kl"] is None
        else "{kl:.4g} nats/token at ratio {cr:g} was above the limit of {max_kl:.4g}"
    )
    kept = "The annealing ended at compression ratio {kept_cr:g}"
    return f"{kept}: the validation KL {measured}.".format(**early_stop)
