"""The whole configuration of a run: one block of options per package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dms_train.config.cluster import ONE_PROCESS, ClusterOptions
from dms_train.data.options import DataOptions
from dms_train.evaluation.options import NO_TASKS, TaskStageOptions, ValidateOptions
from dms_train.hf.options import ModelOptions
from dms_train.kernels.options import KERNELS
from dms_train.limits import OneOf
from dms_train.mcore.options import (
    PLAIN_LORA,
    LoraOptions,
    OptimOptions,
    ParallelOptions,
    Trainable,
)
from dms_train.method.base import MethodOptions
from dms_train.method.token_losses import PLAIN_LOSS, TOKEN_LOSSES, LossOptions
from dms_train.observe.options import ObserveOptions
from dms_train.training.options import LIVE_TEACHER, RunOptions, StageOptions, TeacherOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlock(StageOptions):
    """The stages of training, and the measurements of the export after them."""

    validate_export: ValidateOptions
    run_tasks: TaskStageOptions = NO_TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of `dms-train`. Each package takes its own block, never the whole.

    Attributes:
        kernels: Backend of the attention, one of `kernels.options.KERNELS`.
    """

    model: ModelOptions
    method: MethodOptions
    stage: StageBlock
    data: DataOptions
    parallel: ParallelOptions
    optim: OptimOptions
    observe: ObserveOptions
    run: RunOptions
    cluster: ClusterOptions = ONE_PROCESS
    loss: LossOptions = PLAIN_LOSS
    lora: LoraOptions = PLAIN_LORA
    teacher: TeacherOptions = LIVE_TEACHER
    kernels: Annotated[str, OneOf(*KERNELS)] = "auto"

    @property
    def trainable(self) -> Trainable:
        """Weights of the student that train."""
        return Trainable(weights=self.method.train, lora=self.lora)

    @property
    def shares_teacher(self) -> bool:
        """True if the frozen weights of the student are those of its teacher."""
        return self.method.train != "all" and self.run.load is None

    @property
    def needs_teacher(self) -> bool:
        """True if the loss of any stage to run needs the frozen original."""
        blocks = (getattr(self.stage, name) for name in self.stage.run)
        losses = (TOKEN_LOSSES.get(getattr(block, "loss", "")) for block in blocks)
        return any(loss is not None and loss.needs_teacher for loss in losses)

    @property
    def runs_teacher(self) -> bool:
        """True if the frozen original runs beside the student."""
        return self.needs_teacher and self.teacher.logits is None
