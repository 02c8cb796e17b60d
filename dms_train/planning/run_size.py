"""Steps, exports and disk space of a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats import FORMATS
from dms_train.hf.formats.peft import FORMAT as PEFT
from dms_train.planning.parameters import parameter_count
from dms_train.planning.pipeline_stage import ADAM_MOMENTS
from dms_train.planning.stored_teacher import stored_bytes
from dms_train.planning.trained import adapters, attention_weights, peft_parameters
from dms_train.training.stages import Action, Stage, build_stages

_WIDTHS = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """Amounts of a whole run.

    Attributes:
        steps: Optimizer steps, including those of hold branches.
        checkpoints: Largest number of checkpoints at a time, including one that is being written.
        checkpoint_bytes: Bytes of one checkpoint: weights and optimizer state.
        weights: Number of stage ends whose weights are kept.
        weights_bytes: Bytes of the weights alone.
        exports: Number of exports, without links.
        export_bytes: Bytes of one export: its Megatron weights and its Hugging Face weights, or an
            adapter alone.
        teacher_bytes: Bytes that the stage `teacher_logits` stores.
    """

    steps: int
    checkpoints: int
    checkpoint_bytes: int
    weights: int
    weights_bytes: int
    exports: int
    export_bytes: int
    teacher_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Bytes of what a run never deletes: exports, weights of stage ends, stored teacher."""
        exports = self.weights * self.weights_bytes + self.exports * self.export_bytes
        return exports + self.teacher_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of checkpoints, weights and exports in the run folder at its fullest moment."""
        return self.checkpoints * self.checkpoint_bytes + self.kept_bytes


def run_size(config: RunConfig, architecture: Architecture, loaded_cr: float = 1.0) -> RunSize:
    """Return the amounts of a run that starts from a student of ratio `loaded_cr`."""
    stages = build_stages(config.stage, config.optim.lr_warmup_steps, loaded_cr)
    trained = _trained(stages)
    branches = [ratio for stage in trained for _, ratio in taken_branches(stage)]
    weights = parameter_count(architecture) * _WIDTHS[config.parallel.params_dtype]
    return RunSize(
        steps=sum(stage.steps for stage in trained) + len(branches) * config.stage.hold.steps,
        checkpoints=checkpoint_count(config, loaded_cr, config.stage.run[0]),
        checkpoint_bytes=checkpoint_bytes(config, architecture),
        weights=sum(not _ends_exported(config, stage) for stage in trained[:-1]),
        weights_bytes=weights,
        exports=_exports(config, stages),
        export_bytes=_export_bytes(config, architecture),
        teacher_bytes=stored_bytes(config, architecture.vocab_size),
    )


def checkpoint_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the size of one checkpoint: all weights, and fp32 copy and moments of the trained."""
    count = adapters(architecture, config.trainable, config.method)
    attending = len(architecture.cache_layers)
    added = count.parameters(attending, len(architecture.method_layers))
    weights = parameter_count(architecture) + added
    updated = {
        "all": weights,
        "attention": attending * attention_weights(architecture),
    }.get(config.method.train, added)
    state = updated * _WIDTHS["fp32"] * (1 + ADAM_MOMENTS)
    return weights * _WIDTHS[config.parallel.params_dtype] + state


def taken_branches(stage: Stage) -> Iterator[tuple[int, int]]:
    """Return step and ratio of each hold branch that leaves the annealing of `stage`."""
    return (passed for passed in stage.integer_steps() if passed[1] in stage.branches)


def checkpoint_count(config: RunConfig, loaded_cr: float, begin: str) -> int:
    """Return the largest number of checkpoints at a time, from stage `begin` of the run on.

    One that is being written counts. The number is 0 if nothing is trained from `begin` on.
    """
    stages = build_stages(config.stage, config.optim.lr_warmup_steps, loaded_cr)
    first_stage = config.stage.run.index(begin)
    remaining = _trained(stages[first_stage:])
    if not remaining:
        return 0
    keep = config.run.keep_checkpoints
    # of several checkpoints that a stage leaves, the older ones may still return to a kept one
    limited = remaining if keep == 1 else _trained(stages[:first_stage])[-1:] + remaining
    returns = any(map(_kept_steps, limited)) or any(
        list(taken_branches(stage)) for stage in remaining
    )
    saves, first = 0, 0
    for stage in _trained(stages):
        at_intervals = _interval_steps(config, first, stage)[: keep + 1]  # no more are counted
        saved = {stage.steps, *(step - first for step in at_intervals)}
        if config.stage.export.every_integer_cr:
            saved.update(_ratio_steps(stage))
        saved.update(_kept_steps(stage))
        saves, first = saves + len(saved), first + stage.steps
    # one more is being written; another one is kept to return to
    return min(saves, keep + 1) + returns


def _export_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the size of one export."""
    if config.stage.export.format == PEFT.name:
        count = peft_parameters(architecture, config.trainable, config.method.spec)
        return _WIDTHS["fp32"] * count
    width = _WIDTHS[config.parallel.params_dtype] + _export_width(config)
    return width * parameter_count(architecture)


def _export_width(config: RunConfig) -> int:
    """Return the bytes of an exported number; a format may require a dtype."""
    export = config.stage.export
    required = None if export.format is None else FORMATS[export.format].dtype
    return _WIDTHS[export.dtype or required or config.parallel.params_dtype]


def _interval_steps(config: RunConfig, first: int, stage: Stage) -> range:
    """Return the steps, counted from the start of the run, that `run.save_interval` saves."""
    interval = config.run.save_interval
    if interval == 0:
        return range(0)
    return range(first // interval * interval + interval, first + stage.steps + 1, interval)


def _ratio_steps(stage: Stage) -> list[int]:
    """Return the steps before the last one that pass an integer ratio."""
    return [step for step, _ in stage.integer_steps()]


def _kept_steps(stage: Stage) -> list[int]:
    """Return the steps whose checkpoint an annealing with a KL limit may return to."""
    return [] if stage.max_kl is None else _ratio_steps(stage)


def _ends_exported(config: RunConfig, stage: Stage) -> bool:
    """Return whether the last step of a stage passes an integer ratio that is exported."""
    reached = stage.steps > 0 and stage.integer_passed(stage.steps) is not None
    return reached and config.stage.export.every_integer_cr


def _trained(stages: list[Stage | Action]) -> list[Stage]:
    return [stage for stage in stages if isinstance(stage, Stage)]


def _exports(config: RunConfig, stages: list[Stage | Action]) -> int:
    trained = _trained(stages)
    if config.stage.export.every_integer_cr:
        count = sum(len(_ratio_steps(stage)) + _ends_exported(config, stage) for stage in trained)
    else:
        count = sum(len(list(taken_branches(stage))) for stage in trained)
    is_link = bool(trained) and _ends_exported(config, trained[-1])
    return count + ("export" in stages and not is_link)
