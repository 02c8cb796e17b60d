"""Stages of the recipe: each is a number of steps and a plan for every step.

Steps count from 1 inside the formulas, so the last step of a ramp reaches its end. The eviction
channel is zero in the last zeroing step, and the ratio is the target in the last retrofit step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from dms_train import limits
from dms_train.method import schedule
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.training.options import (
    HoldOptions,
    PretrainOptions,
    RetrofitOptions,
    StageOptions,
    ZeroNeuronOptions,
)

Action = Literal["teacher_logits", "export", "validate_export", "run_tasks"]
# Actions take no step.
_ACTIONS: dict[str, Action] = {name: name for name in get_args(Action)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training stage.

    Attributes:
        steps: Number of optimizer steps.
        requires_eviction: Whether its steps read decisions, so eviction must be enabled.
        enables_eviction: Whether the end of the stage enables eviction.
        resets_eviction_channel: Whether the eviction channel's weights are zeroed when eviction
            is enabled.
        branches: Hold branches, by the integer ratio after which the annealing takes them.
        max_kl: Validation KL in nats per token above which the stage ends early; None for no limit.
    """

    name: str
    steps: int
    loss: str
    rate: LearningRate
    requires_eviction: bool = False
    enables_eviction: bool = False
    resets_eviction_channel: bool = True
    branches: Mapping[int, Stage] = field(default_factory=dict)
    max_kl: float | None = None

    def plan(self, step: int, stage_step: int) -> StepPlan:
        """Return the plan of the step after `stage_step` finished steps."""
        return StepPlan(step=step, stage_step=stage_step, loss=self.loss)

    def eval_plan(self, step: int, stage_step: int) -> StepPlan:
        """Return the plan of an evaluation at this position, with the decisions of inference."""
        plan = self.plan(step, max(0, stage_step - 1))
        return replace(plan, eviction="hard") if plan.eviction == "soft" else plan

    def integer_passed(self, stage_step: int) -> int | None:
        """Return the integer ratio that step `stage_step` reached, if it reached one."""
        return None

    def integer_steps(self) -> Iterator[tuple[int, int]]:
        """Yield step and ratio of each integer ratio that a step before the last one reaches."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroNeuronStage(Stage):
    """Ramp of the eviction channel to zero (paper appendix B)."""

    def plan(self, step: int, stage_step: int) -> StepPlan:
        """Let the factor fall linearly to 0."""
        factor = schedule.channel_scale(stage_step + 1, self.steps)
        return StepPlan(step=step, stage_step=stage_step, loss=self.loss, channel_scale=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitStage(Stage):
    """Annealing of the compression ratio with relaxed decisions (paper section 3.2)."""

    start_cr: float
    target_cr: float
    steps_per_cr: int
    layer_weights: tuple[float, ...] = ()

    def plan(self, step: int, stage_step: int) -> StepPlan:
        """Let the ratio grow by one unit per `steps_per_cr` steps."""
        ratio = schedule.compression_ratio(
            stage_step + 1, self.steps_per_cr, self.target_cr, self.start_cr
        )
        return StepPlan(
            step=step,
            stage_step=stage_step,
            loss=self.loss,
            channel_scale=0.0,
            eviction="soft",
            target_cr=ratio,
            layer_weights=self.layer_weights,
        )

    def integer_passed(self, stage_step: int) -> int | None:
        """Return the integer that the annealed ratio crosses, if any."""
        before, now = self._integer_after(stage_step - 1), self._integer_after(stage_step)
        return now if now > before else None

    def integer_steps(self) -> Iterator[tuple[int, int]]:
        """Search the step of each integer, because there may be billions of steps."""
        for ratio in range(int(self.start_cr) + 1, int(self.target_cr) + 1):
            step = bisect.bisect_left(range(self.steps), ratio, key=self._integer_after)
            if step < self.steps:
                yield step, ratio

    def _integer_after(self, stage_step: int) -> int:
        ratio = schedule.compression_ratio(
            stage_step, self.steps_per_cr, self.target_cr, self.start_cr
        )
        return int(ratio)

    def held_at(self, ratio: float) -> RetrofitStage:
        """Return the stage with all of its steps at `ratio`."""
        return replace(self, start_cr=ratio, target_cr=ratio)


def _constant(lr: float, steps: int, warmup: int) -> LearningRate:
    return LearningRate(max_lr=lr, min_lr=lr, steps=steps, warmup_steps=warmup, style="constant")


def _cosine(lr: float, ratio: float, steps: int, warmup: int) -> LearningRate:
    return LearningRate(
        max_lr=lr, min_lr=lr * ratio, steps=steps, warmup_steps=warmup, style="cosine"
    )


def _rate_of(block: PretrainOptions | ZeroNeuronOptions | RetrofitOptions | HoldOptions) -> float:
    """Return the learning rate of a stage; `config.resolve` replaces None by `optim.lr`."""
    if block.lr is None:
        raise ValueError(f"{type(block).__name__}.lr is None: give every stage a learning rate")
    return block.lr


def build_stages(
    options: StageOptions, warmup: int, loaded_cr: float = 1.0, layers: Sequence[int] = ()
) -> list[Stage | Action]:
    """Build the entries of `stage.run` in order.

    Args:
        options: Stage settings, with the learning rate of every stage.
        warmup: Warm-up steps of every stage except `hold`.
        loaded_cr: Ratio of the student the run starts from: `retrofit` continues from it, and
            `hold` keeps it when no `retrofit` precedes.
        layers: Numbers of the layers on which the method acts, for `retrofit.layer_ratios`; empty
            where only the number of steps matters.

    Raises:
        ValueError: A value has a wrong type; the first one, with its key. Or `layer_ratios` do not
            fit the ratio of all layers.
    """
    for problem in limits.wrong_types(options, "stage"):
        raise ValueError(problem)
    stages: list[Stage | Action] = []
    ratio = loaded_cr
    for name in options.run:
        stages.append(_ACTIONS.get(name) or _build(name, options, warmup, ratio))
        if name == "retrofit":
            ratio = options.retrofit.target_cr
    ratios = options.retrofit.layer_ratios
    if not (ratios and layers and "retrofit" in options.run):
        return stages
    weights = schedule.layer_weights(ratios, ratio, layers)
    return [_weighted(stage, weights) if isinstance(stage, Stage) else stage for stage in stages]


def _weighted(stage: Stage, weights: tuple[float, ...]) -> Stage:
    """Return a stage with a target of its own for each layer, if it evicts."""
    if not isinstance(stage, RetrofitStage):
        return stage
    branches = {ratio: _weighted(branch, weights) for ratio, branch in stage.branches.items()}
    return replace(stage, layer_weights=weights, branches=branches)


def _build(name: str, options: StageOptions, warmup: int, ratio: float) -> Stage:
    if name == "pretrain":
        p = options.pretrain
        rate = _cosine(_rate_of(p), p.min_lr_ratio, p.steps, warmup)
        return Stage(name=name, steps=p.steps, loss="lm", rate=rate)
    if name == "zero_neuron":
        z = options.zero_neuron
        rate = _constant(_rate_of(z), z.steps, warmup)
        return ZeroNeuronStage(
            name=name,
            steps=z.steps,
            loss=z.loss,
            rate=rate,
            enables_eviction=True,
            resets_eviction_channel=z.resets_eviction_channel,
        )
    if name == "retrofit":
        r = options.retrofit
        start = ratio if r.start_cr is None else r.start_cr
        steps = schedule.anneal_steps(r.steps_per_cr, r.target_cr, start)
        return RetrofitStage(
            name=name,
            steps=steps,
            loss=r.loss,
            rate=_constant(_rate_of(r), steps, warmup),
            requires_eviction=True,
            start_cr=r.target_cr if r.annealing == "immediate" else start,
            target_cr=r.target_cr,
            steps_per_cr=r.steps_per_cr,
            max_kl=r.max_kl,
            branches={cr: _hold(options.hold, cr) for cr in options.hold.branch_ratios or ()},
        )
    return _hold(options.hold, ratio)


def _hold(h: HoldOptions, ratio: float) -> RetrofitStage:
    """Build a hold: a retrofit that starts at its target."""
    return RetrofitStage(
        name="hold",
        steps=h.steps,
        loss=h.loss,
        rate=_cosine(_rate_of(h), h.min_lr_ratio, h.steps, 0),
        requires_eviction=True,
        start_cr=ratio,
        target_cr=ratio,
        steps_per_cr=1,
    )
