"""What one optimizer step does differently from the next, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Eviction = Literal["none", "soft", "hard", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything the model needs to know about the current step; the same on every rank.

    Attributes:
        step: Global optimizer step, part of the noise key.
        stage_step: Step within the stage, position on its learning-rate schedule.
        neuron_scale: Factor on the borrowed activation; 1 leaves the model untouched, 0 clears it.
        eviction: `none`; `soft` relaxed with noise (training); `hard` thresholded (inference
            rule); `all` evicts every token that leaves the window (window-only control).
        target_cr: Compression ratio asked for; 1 asks for nothing.
        loss: `distill` against the frozen teacher or `lm` next-token loss.
        noise: Whether the relaxation is noisy (off only in checks).
    """

    step: int = 0
    stage_step: int = 0
    neuron_scale: float = 1.0
    eviction: Eviction = "none"
    target_cr: float = 1.0
    loss: Literal["distill", "lm"] = "distill"
    noise: bool = True
