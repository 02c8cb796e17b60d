"""Products in FP8 against bf16 and against a product of tensors that torch quantises."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.mcore.options import FP8_CAPABILITY

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
HAS_GPU = torch.cuda.is_available()
HAS_FP8 = HAS_GPU and torch.cuda.get_device_capability() >= FP8_CAPABILITY
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs a GPU"),
    pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with FP8 products"),
    pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine"),
]
E4M3_MAX = 448.0
# Two significant bits of a gradient in e5m2 and three of an activation in e4m3, over two layers of
# 64 channels; 0.207 on an H200.
GRADIENT_BAR = 0.25


@pytest.fixture(scope="module")
def view() -> Iterator[object]:
    from dms_train.mcore import groups
    from dms_train.mcore.options import ParallelOptions

    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


def build(view: object, *, fp8: bool, **options: Any) -> Any:
    from tests.support import layers_worker

    return layers_worker.build("transformer_engine", "llama", view, "bf16", fp8=fp8, **options)


def outcome(engine: Any, **plan: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step that evicts nothing."""
    from dms_train.method.plan import StepPlan
    from tests.support import tiny

    totals = engine.forward_backward(StepPlan(loss="lm", **plan), tiny.microbatches(0, 1))
    return totals.token_loss, engine.hf_gradients()


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients, relative."""
    difference = sum((found[name] - g).double().square().sum() for name, g in expected.items())
    whole = sum(g.double().square().sum() for g in expected.values())
    return float((difference / whole) ** 0.5)


def decisions(engine: Any) -> list[Tensor]:
    """Decision logits of every layer for the same microbatches."""
    from dms_train.method.plan import StepPlan
    from tests.support import tiny

    attentions = [layer.self_attention for layer in engine._models[0].decoder.layers]
    for attention in attentions:
        attention.recorded = []
    plan = StepPlan(loss="lm", eviction="soft", channel_scale=0.0, target_cr=4.0)
    engine.evaluate(plan, tiny.microbatches(0, 1))
    return [attention.recorded[0] for attention in attentions]


def quantised(x: Tensor) -> Tensor:
    """Round a tensor to e4m3, scaled by its largest absolute value."""
    scale = E4M3_MAX / x.float().abs().max()
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


def test_decisions_of_the_first_layer_are_those_of_bf16(view) -> None:
    plain, cast = (decisions(build(view, fp8=fp8)) for fp8 in (False, True))
    assert torch.equal(plain[0], cast[0])
    assert not torch.equal(plain[1], cast[1])  # after products in FP8


@pytest.mark.parametrize("part", ["mlp.linear_fc2", "self_attention.linear_proj"])
def test_a_product_is_that_of_quantised_tensors(view, part: str) -> None:
    engine = build(view, fp8=True)
    layer = engine._models[0].decoder.layers[0].get_submodule(part)
    rows, columns = layer.weight.shape
    x = torch.randn(48, 1, columns, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = layer(x)[0].float().view(-1, rows)
    x = x.view(-1, columns)
    expected = quantised(x) @ quantised(layer.weight).t()
    exact = x.float() @ layer.weight.float().t()
    # the output is rounded to bf16
    assert (found - expected).norm() <= 5e-3 * expected.norm()
    assert (found - exact).norm() >= 1e-2 * exact.norm()


def test_loss_and_gradients_are_near_those_of_bf16(view) -> None:
    (loss, gradients), (fp8_loss, fp8_gradients) = (
        outcome(build(view, fp8=fp8)) for fp8 in (False, True)
    )
    assert fp8_loss != loss
    assert fp8_loss == pytest.approx(loss, rel=0.03)
    assert all(gradient.isfinite().all() for gradient in fp8_gradients.values())
    found = apart(fp8_gradients, gradients)
    print(f"loss {loss:.4f} and {fp8_loss:.4f}, gradients apart {found:.3f}")
    assert 1e-3 < found <= GRADIENT_BAR


def test_a_step_with_decisions_is_finite(view) -> None:
    loss, gradients = outcome(
        build(view, fp8=True), step=3, eviction="soft", channel_scale=0.0, target_cr=4.0
    )
    assert torch.tensor(loss).isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    ],
    ids=["full", "mlp"],
)
def test_recomputed_passes_use_the_same_products(view, recompute: dict[str, Any]) -> None:
    loss, gradients = outcome(build(view, fp8=True))
    again, repeated = outcome(build(view, fp8=True, **recompute))
    assert again == pytest.approx(loss, rel=1e-5)
    assert apart(repeated, gradients) <= 1e-3


def test_a_teacher_uses_the_same_products(view) -> None:
    from dms_train.mcore.layers import fp8
    from dms_train.method.plan import StepPlan
    from tests.support import tiny

    engine = build(view, fp8=True)
    engine.attach_teacher(None)
    plan, batches = StepPlan(loss="distill"), tiny.microbatches(0, 1)
    same = engine.evaluate(plan, batches).token_loss
    with fp8.paused(engine._models[0]._teacher):
        other = engine.evaluate(plan, batches).token_loss
    assert abs(same) <= 1e-5
    assert other > 10 * max(same, 1e-6)


def test_replayed_steps_are_those_of_eager_passes(view) -> None:
    from dms_train.method.plan import StepPlan
    from tests.support import layers_worker, tiny

    soft = {"eviction": "soft", "channel_scale": 0.0, "target_cr": 4.0}
    losses = []
    for mode in ("never", "always"):
        engine = build(view, fp8=True, cuda_graph=mode)
        engine.attach_teacher(None)
        first = layers_worker.tensors(engine)
        plans = [StepPlan(step=number, stage_step=number, **soft) for number in range(6)]
        losses.append([engine.train_step(plan, tiny.microbatches(0, 1)).loss for plan in plans])
    assert engine._graph._captured is not None
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    last = layers_worker.tensors(engine)
    assert not all(torch.equal(last[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("writes", [False, True], ids=["bf16_to_fp8", "fp8_to_bf16"])
def test_checkpoints_move_between_fp8_and_bf16(view, tmp_path: Path, writes: bool) -> None:
    from tests.support import layers_worker

    source, target = build(view, fp8=writes), build(view, fp8=not writes)
    for number in range(2):
        layers_worker.step(source, number)
    source.save(tmp_path / "checkpoint", {"permanent": True})
    assert layers_worker.recorded(source) == layers_worker.recorded(target)
    states = [
        [
            module.get_extra_state().numel()
            for module in engine._models[0].modules()
            if hasattr(module, "fp8_meta")
        ]
        for engine in (source, target)
    ]
    assert states[0] == states[1]
    assert not any(states[0])
    target.load(tmp_path / "checkpoint", with_optimizer=True)
    written, read = (layers_worker.tensors(engine) for engine in (source, target))
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    losses = [layers_worker.step(engine, 2) for engine in (source, target)]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
