"""A training step of the whole model on a GPU is the same with every attention backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dms_train.kernels.options import KERNELS
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FUSED = [name for name in KERNELS if name not in ("auto", "reference")]


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


def one_step(
    view: ParallelView, kernels: str, parallel: ParallelOptions, *, packed: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """Token loss of a soft distillation step, and its gradients by name."""
    architecture = tiny.architecture("qwen3", num_layers=2)
    spec = PRESETS["dms"].override(window=4, alpha_offset=0.5)
    options = TrainEngineOptions(
        parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7, kernels=kernels
    )
    eviction_channels = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.002)
    engine = McoreEngine(architecture, spec, view, options, eviction_channels)
    engine.attach_teacher(RandomWeights(architecture, 2, 0.2))
    plan = StepPlan(step=3, eviction="soft", channel_scale=0.0, target_cr=4.0)
    batches = tiny.microbatches(0, 1)
    if packed:
        batches = [tiny.packed(batch, [[11, 1, 9], [8, 16]]) for batch in batches]
    totals = engine.forward_backward(plan, batches)
    return totals.token_loss, engine.hf_gradients()


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("kernels", FUSED)
def test_loss_and_gradients_are_those_of_the_reference(
    view: ParallelView, kernels: str, recompute: str | None
) -> None:
    parallel = ParallelOptions(recompute_granularity=recompute)
    loss, gradients = one_step(view, kernels, parallel)
    expected_loss, expected = one_step(view, "reference", ParallelOptions())
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 2e-3 * expected[name].norm() + 1e-7, name


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("kernels", FUSED)
def test_packed_documents_train_as_with_the_reference(
    view: ParallelView, kernels: str, recompute: str | None
) -> None:
    parallel = ParallelOptions(recompute_granularity=recompute)
    loss, gradients = one_step(view, kernels, parallel, packed=True)
    expected_loss, expected = one_step(view, "reference", ParallelOptions(), packed=True)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 2e-3 * expected[name].norm() + 1e-7, name


@pytest.mark.parametrize("kernels", FUSED)
def test_bf16_weights_give_nearly_the_same_loss(view: ParallelView, kernels: str) -> None:
    loss, gradients = one_step(view, kernels, ParallelOptions(params_dtype="bf16"))
    expected_loss, _ = one_step(view, "reference", ParallelOptions(params_dtype="bf16"))
    assert loss == pytest.approx(expected_loss, rel=3e-2)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_gpu_trains_with_triton_by_default(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dms_train.kernels.train_attention import triton_attention as triton_train

    calls = []
    fused = triton_train.dms_attention

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        return fused(*args, **kwargs)

    monkeypatch.setattr(triton_train, "dms_attention", counted)
    one_step(view, "auto", ParallelOptions())
    assert calls
