"""Every optimizer option reaches the update: weights after steps against AdamW written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.app.engine import build_engine
from dms_train.app.preparation import Prepared
from dms_train.app.start_point import StartPoint
from dms_train.config.build import build
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from dms_train.training.state import TrainState
from tests.support import configs, tiny

# Megatron's own values, so that an option that is not passed on is the only one that is wrong.
BASE = OptimOptions(
    lr=1e-3, weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8, clip_grad=1.0
)
CHANGES: dict[str, float] = {
    "clip_grad": 0.125,
    "adam_beta1": 0.5,
    "adam_beta2": 0.7,
    "adam_eps": 0.03,
    "weight_decay": 5.0,
}
RATES = (2e-3, 3e-4)  # of two stages; neither is that of the options
STEPS = 2  # of each stage

Weights = dict[str, Tensor]


def options(**changes: float) -> OptimOptions:
    values = {name: getattr(BASE, name) for name in BASE.__slots__}
    return OptimOptions(**{**values, **changes})


def engine(view: ParallelView, optim: OptimOptions, **parallel: str) -> McoreEngine:
    architecture = tiny.architecture("qwen2", num_layers=2)  # which has biases
    spec = PRESETS["dms"].override(window=4)
    given = TrainEngineOptions(parallel=ParallelOptions(**parallel), optim=optim, seed=7)
    return McoreEngine(
        architecture, spec, view, given, tiny.SmallEvictionChannels(architecture, 1, 0)
    )


def constant(lr: float) -> LearningRate:
    return LearningRate(max_lr=lr, min_lr=lr, steps=STEPS, warmup_steps=0, style="constant")


class AdamW:
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, after clipping by the global norm."""

    def __init__(self, weights: Weights, optim: OptimOptions) -> None:
        self.weights = {name: w.double() for name, w in weights.items()}
        self.optim, self.steps = optim, 0
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def step(self, gradients: Weights, lr: float) -> None:
        """Vectors, which are biases and norms, do not decay (megatron's rule)."""
        o = self.optim
        self.steps += 1
        norm = sum(g.double().square().sum() for g in gradients.values()) ** 0.5
        clip = min(1.0, o.clip_grad / (float(norm) + 1e-6)) if o.clip_grad > 0 else 1.0
        for name, w in self.weights.items():
            g = gradients[name].double() * clip
            self.first[name] = o.adam_beta1 * self.first[name] + (1 - o.adam_beta1) * g
            self.second[name] = o.adam_beta2 * self.second[name] + (1 - o.adam_beta2) * g * g
            mean = self.first[name] / (1 - o.adam_beta1**self.steps)
            square = self.second[name] / (1 - o.adam_beta2**self.steps)
            decay = o.weight_decay * w if w.dim() > 1 else 0.0
            self.weights[name] = w - lr * (mean / (square.sqrt() + o.adam_eps) + decay)


def both(view: ParallelView, optim: OptimOptions) -> tuple[Weights, Weights, Weights]:
    """Weights before, after two stages of the engine, and as the formulas have them."""
    trained = engine(view, optim)
    before = dict(trained.hf_tensors())
    exact = AdamW(before, optim)
    for stage, lr in enumerate(RATES):
        trained.begin_stage(constant(lr))
        for step in range(STEPS):
            number = stage * STEPS + step
            plan = StepPlan(step=number, stage_step=step, loss="lm")
            batches = tiny.microbatches(0, 1, groups=2 + number)
            trained.forward_backward(plan, batches)
            exact.step(trained.hf_gradients(), lr)
            result = trained.train_step(plan, batches)
            assert result.learning_rate == lr
    return before, dict(trained.hf_tensors()), exact.weights


@pytest.mark.parametrize("name", [*CHANGES, "none", "no clipping"])
def test_weights_move_as_adamw_with_this_option_moves_them(view: ParallelView, name: str) -> None:
    changes = {name: CHANGES[name]} if name in CHANGES else {}
    optim = options(**({"clip_grad": 0.0} if name == "no clipping" else changes))
    before, found, exact = both(view, optim)
    for weight, start in before.items():
        moved, expected = found[weight] - start, (exact[weight] - start).float()
        assert expected.abs().max() > 1e-4
        # a weight of size 1 is stored to 6e-8, and there are four steps
        torch.testing.assert_close(moved, expected, rtol=2e-4, atol=5e-7, msg=weight)


@pytest.mark.parametrize("name", CHANGES)
def test_the_cases_distinguish_the_options(view: ParallelView, name: str) -> None:
    """With this option at megatron's own value the weights end elsewhere."""
    _, found, _ = both(view, options(**{name: CHANGES[name]}))
    _, other, _ = both(view, BASE)
    assert max((found[n] - other[n]).abs().max() for n in found) > 1e-4


def test_gradients_of_microbatches_are_summed_in_float32(view: ParallelView) -> None:
    """Each of them has 8 bits in bfloat16; their sum has more."""
    trained = engine(view, BASE, params_dtype="bf16")
    trained.forward_backward(StepPlan(loss="lm"), tiny.microbatches(0, 1, groups=6))
    for name, gradient in trained.hf_gradients().items():
        assert gradient.dtype == torch.float32
        assert (gradient != gradient.bfloat16().float()).any(), name


def adam_groups(trained: McoreEngine) -> list[dict[str, Any]]:
    return [
        group
        for part in compat.optimizer_parts(trained._optimizer)
        for group in part.optimizer.param_groups
    ]


@pytest.mark.parametrize("clip", [0.125, 0.0])
def test_the_first_moment_shows_the_clipped_norm(view: ParallelView, clip: float) -> None:
    trained = engine(view, options(clip_grad=clip))
    trained.begin_stage(constant(1e-3))
    result = trained.train_step(StepPlan(loss="lm"), tiny.microbatches(0, 1))
    assert result.grad_norm > 1
    moments = [
        entry["exp_avg"]
        for part in compat.optimizer_parts(trained._optimizer)
        for entry in part.optimizer.state.values()
    ]
    norm = sum(m.double().square().sum() for m in moments) ** 0.5 / (1 - BASE.adam_beta1)
    assert float(norm) == pytest.approx(clip or result.grad_norm, rel=1e-4)


def test_the_configuration_of_a_run_is_what_the_optimizer_runs_with(
    view: ParallelView, tmp_path: Path
) -> None:
    """From `optim` in the configuration to the groups of the optimizer that updates."""
    changed = {f"optim__{name}": value for name, value in CHANGES.items()}
    config = build(configs.mapping(**changed, optim__lr=4e-4, method__window=4))
    architecture = tiny.architecture("llama", num_layers=2)
    start = StartPoint(
        architecture=architecture, model_dir=None, tokenizer_dir=None, state=TrainState()
    )
    prepared = Prepared(
        config=config,
        architecture=architecture,
        spec=config.method.spec,
        start=start,
        stages=[],
        folder=tmp_path,
        since=0.0,
    )
    trained = build_engine(prepared, view)
    trained.begin_stage(constant(5e-4))
    trained.train_step(StepPlan(loss="lm"), [tiny.batch(0)])
    groups = adam_groups(trained)
    assert {group["betas"] for group in groups} == {(0.5, 0.7)}
    assert {group["eps"] for group in groups} == {0.03}
    assert {group["lr"] for group in groups} == {5e-4}
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 5.0]
    parts = compat.optimizer_parts(trained._optimizer)
    assert {part.config.clip_grad for part in parts} == {0.125}
