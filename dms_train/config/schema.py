"""The whole configuration of a run: one block of options per room."""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.config.cluster import ONE_PROCESS, ClusterOptions
from dms_train.data.options import DataOptions
from dms_train.evaluation.options import ValidateOptions
from dms_train.hf.options import ModelOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.options import MethodOptions
from dms_train.observe.options import ObserveOptions
from dms_train.training.options import RunOptions, StageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlock(StageOptions):
    """The stages, and the validation that the training does not know by content."""

    validate: ValidateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What `dms-train` is asked to do; each room is handed its own block and never this.

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
    kernels: str = "auto"
