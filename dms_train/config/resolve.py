"""Values that a configuration leaves to another key, replaced once, when it is composed.

The run folder, Weights & Biases and `dms-plan` then hold what is used. Values that depend on the
machine (`kernels=auto`) or on other files (`stage.retrofit.start_cr`) stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from dms_train import limits
from dms_train.config.schema import RunConfig, StageBlock
from dms_train.hf.formats import format_of_preset

_STAGES_WITH_A_RATE = ("pretrain", "zero_neuron", "retrofit", "hold")


def resolved(config: RunConfig) -> RunConfig:
    """Fill in the learning rate of every stage and the export's format."""
    stage = config.stage
    if stage.export.format is None:
        name = format_of_preset(config.method.preset, config.method.kind)
        stage = replace(stage, export=replace(stage.export, format=name))
    # a learning rate that is refused is refused once, under the key that was written
    if not any(limits.problems(config.optim)):
        stage = _with_rates(stage, config.optim.lr)
    return replace(config, stage=stage)


def _with_rates(stage: StageBlock, lr: float) -> StageBlock:
    blocks = {name: getattr(stage, name) for name in _STAGES_WITH_A_RATE}
    unset = {name: replace(block, lr=lr) for name, block in blocks.items() if block.lr is None}
    return replace(stage, **unset)
