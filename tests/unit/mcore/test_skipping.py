"""A step whose loss or gradient norm is not finite leaves no trace in weights and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dms_train.data.batches import Batch
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.schedule.step_statistics import DeviceTotals, PassTotals
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from tests.support import tiny

RATE = LearningRate(max_lr=1e-2, min_lr=1e-3, steps=6, warmup_steps=1, style="cosine")
# The loss of 1e30 times the weights is finite, the sum of the squared gradients is not.
NOT_FINITE = {"loss": math.nan, "gradient norm": 1e30}


def step(engine: McoreEngine, number: int, factor: float = 1.0) -> StepResult:
    batch = tiny.batch(8 * number)
    batch = batch._replace(loss_mask=batch.loss_mask * factor)
    plan = StepPlan(step=number, stage_step=number, loss="lm", eviction="soft", target_cr=4.0)
    engine._context = lambda plan, batches: McoreEngine._context(engine, plan, batches)._replace(  # type: ignore[method-assign]
        token_scale=0.02
    )
    return engine.train_step(plan, [batch])


def everything(engine: McoreEngine) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    for part in compat.optimizer_parts(engine._optimizer):
        for place, entry in enumerate(part.optimizer.state.values()):
            state |= {f"{place}.{name}": tensor.clone() for name, tensor in entry.items()}
        for place, group in enumerate(part.optimizer.param_groups):
            state |= {f"{place}.main.{i}": p.data.clone() for i, p in enumerate(group["params"])}
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_skipped_step_changes_nothing(
    build: Callable[..., McoreEngine], dtype: str, what: str
) -> None:
    engine, undisturbed = (build("llama", "dms", dtype) for _ in range(2))
    for made in (engine, undisturbed):
        made.begin_stage(RATE)
        assert not step(made, 0).skipped
    before = everything(engine)
    for number in (1, 2):
        result = step(engine, number, NOT_FINITE[what])
        assert result.skipped
        assert math.isfinite(result.loss) == (what == "gradient norm")
        assert not math.isfinite(result.grad_norm)
        assert same(everything(engine), before)
    last, other = step(engine, 3), step(undisturbed, 3)
    assert not last.skipped
    assert (last.loss, last.grad_norm, last.learning_rate) == (
        other.loss,
        other.grad_norm,
        other.learning_rate,
    )
    assert same(everything(engine), everything(undisturbed))


def test_an_infinite_loss_is_enough(
    build: Callable[..., McoreEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build("llama", "dms", "fp32")
    engine.begin_stage(RATE)
    step(engine, 0)
    before = everything(engine)

    def overflows(plan: StepPlan, batches: list[Batch]) -> DeviceTotals:
        totals = McoreEngine._gradients(engine, plan, batches)
        totals.values[0] = math.inf
        return totals

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_gradients", overflows)
        result = step(engine, 1)
    assert result.skipped
    assert math.isinf(result.loss)
    assert 0 < result.grad_norm < math.inf
    assert same(everything(engine), before)
    assert not step(engine, 2).skipped


def test_the_host_reads_the_totals_once_and_before_the_update(
    build: Callable[..., McoreEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, order = build("llama", "dms", "fp32"), []
    engine.begin_stage(RATE)

    class Totals:
        def __init__(self, *given: Any) -> None:
            self.totals = McoreEngine._gradients(engine, *given)

        def read(self) -> PassTotals:
            order.append("totals")
            return self.totals.read()

    update = engine._optimizer.step_with_ready_grads
    monkeypatch.setattr(engine, "_gradients", Totals)
    monkeypatch.setattr(
        engine._optimizer, "step_with_ready_grads", lambda: order.append("update") or update()
    )
    plan = StepPlan(loss="lm")
    done = engine.train_step(plan, [tiny.batch(0)], lambda: order.append("meanwhile"))
    assert not done.skipped
    assert order == ["meanwhile", "totals", "update"]


def test_the_host_works_after_the_gradients_and_before_the_update(
    build: Callable[..., McoreEngine],
) -> None:
    engine = build("llama", "dms")
    engine.begin_stage(RATE)
    batch, plan, seen = tiny.batch(0), StepPlan(loss="lm"), []
    engine.forward_backward(plan, [batch])
    gradients, weights = engine.hf_gradients(), dict(engine.hf_tensors())
    engine.train_step(
        plan, [batch], lambda: seen.append((engine.hf_gradients(), dict(engine.hf_tensors())))
    )
    assert len(seen) == 1
    assert same(seen[0][0], gradients)
    assert same(seen[0][1], weights)
    assert not same(dict(engine.hf_tensors()), weights)
