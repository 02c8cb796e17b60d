"""A run's expected memory beside what its GPUs have, before anything is allocated."""

from __future__ import annotations

import torch

from dms_train.config import layouts, memory
from dms_train.config.build import ConfigError
from dms_train.config.gpus import like
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log


def check_memory(config: RunConfig, architecture: Architecture, view: ParallelView) -> None:
    """Refuse what cannot fit this GPU whatever the batch, warn of what is not expected to.

    Raises:
        ConfigError: Weights, gradients and optimizer state alone are too large.
    """
    if view.device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(view.device)
    gpu = like(found.name, found.total_memory)
    problems = layouts.memory_problems(config, architecture, view.world_size, gpu)
    if not problems:
        return
    stages = memory.estimate_stages(config, architecture, view.world_size)
    if max(stage.fixed for stage in stages) > found.total_memory:
        raise ConfigError(*problems)
    if view.rank == 0:
        log.logger().warning("%s", problems[0])
