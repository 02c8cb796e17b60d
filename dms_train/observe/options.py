"""Options of the records of a run and their destinations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dms_train.limits import OneOf, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Progress on the terminal, `metrics.jsonl` (always), Weights & Biases and TensorBoard.

    Attributes:
        wandb: `offline`, `online` or `disabled`.
        project: Weights & Biases project.
        entity: Weights & Biases entity; None takes the account's default.
        name: Run name; None takes the name of the run folder.
        tensorboard: Also write event files to `tensorboard/` in the run folder.
        peak_tflops: Peak TFLOP/s of a device in the precision of the training, for the MFU; None
            reports no MFU.
        progress: Show a progress bar on rank 0 when the terminal allows it.
    """

    wandb: Annotated[str, OneOf("offline", "online", "disabled")] = "offline"
    project: str = "dms-retrofit"
    entity: str | None = None
    name: str | None = None
    tensorboard: bool = False
    peak_tflops: Annotated[float | None, Positive()] = None
    progress: bool = True
