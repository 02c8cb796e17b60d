"""Values that default to another key; they are filled in once, when a configuration is composed.

The run folder, Weights & Biases and `dms-plan` then show the values in use. Those that depend on
the machine (`kernels=auto`) or on other files (`stage.retrofit.start_cr`) stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from dms_train import limits
from dms_train.config.schema import RunConfig, StageBlock
from dms_train.hf.formats import format_of_preset
from dms_train.training.options import TRAINED_STAGES


def resolved(config: RunConfig) -> RunConfig:
    """Fill in the learning rate of every stage and the export's format."""
    stage = config.stage
    if stage.export.format is None:
        name = format_of_preset(config.method.preset, config.method.kind)
        stage = replace(stage, export=replace(stage.export, format=name))
    # report an invalid learning rate once, under the key that the user wrote
    if not any(limits.problems(config.optim)):
        stage = _with_rates(stage, config.optim.lr)
    return replace(config, stage=stage)


def _with_rates(stage: StageBlock, lr: float) -> StageBlock:
    blocks = {name: getattr(stage, name) for name in TRAINED_STAGES}
    unset = {name: replace(block, lr=lr) for name, block in blocks.items() if block.lr is None}
    return replace(stage, **unset)
