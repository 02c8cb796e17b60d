"""Comparison of a run's expected memory with that of its GPUs, before anything is allocated."""

from __future__ import annotations

import torch

from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log
from dms_train.planning import layouts, memory, validation_memory
from dms_train.planning.gpus import like

_GIB = 2**30


def check_memory(
    config: RunConfig, architecture: Architecture, view: ParallelView, *, validates: bool
) -> None:
    """Fail if weights and optimizer state exceed GPU memory; warn if activations probably do.

    All ranks call it and decide by the GPU with the largest shortage, on whichever rank it is.
    Rank 0 validates, so its GPU must hold a model beside the state of the training.

    Args:
        config: The configuration.
        architecture: Architecture of the model.
        view: Position of this rank in the parallel groups.
        validates: True if the process later runs the stage `validate_export`.

    Raises:
        ConfigError: Weights, gradients and optimizer state alone are too large, or a validation
            does not fit beside them; on every rank.
    """
    if view.device.type != "cuda":
        return
    own = torch.cuda.get_device_properties(view.device)
    gpus = groups.values((own.name, own.total_memory, view.pp_rank))
    stages = memory.estimate_stages(config, architecture, view.world_size)
    if validates:
        name, total, _ = gpus[0]
        problem = validation_memory.problem(config, architecture, name, total, stages[0].fixed)
        if problem is not None:
            raise ConfigError(
                f"{problem}; leave it out of stage.run and run dms-validate afterwards"
            )
    lacks = [stages[stage].fixed - total for _, total, stage in gpus]
    rank = lacks.index(max(lacks))
    name, total, _ = gpus[rank]
    problems = layouts.memory_problems(config, architecture, view.world_size, like(name, total))
    if not problems:
        return
    if len({gpu[:2] for gpu in gpus}) > 1:
        own_gpu = f"rank {rank} has a {name} with {total / _GIB:.1f} GiB"
        problems = [f"{own_gpu}: {problem}" for problem in problems]
    if lacks[rank] > 0:
        raise ConfigError(*problems)
    if view.rank == 0:
        log.logger().warning("%s", problems[0])
