"""The output layer's weight gradient reaches megatron's buffers, summed there or by autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny


def gradients(view: ParallelView, family: str, loss: Any, *, fused: bool) -> dict[str, Any]:
    """Return gradients of two microbatches; only the output layer follows `fused`."""
    architecture = tiny.architecture(family, num_layers=1)
    spec = PRESETS["dms"].override(window=4)
    options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=7)
    engine = McoreEngine(architecture, spec, view, options, RandomWeights(architecture, 1, 0.2))
    engine.attach_teacher(RandomWeights(architecture, 2, 0.2))
    engine._config.gradient_accumulation_fusion = fused
    plan = StepPlan(eviction="none", channel_scale=0.0, loss=loss)
    engine.forward_backward(plan, tiny.microbatches(0, 1, groups=2))
    return engine.hf_gradients()


@pytest.mark.parametrize("loss", ["distill", "lm"])
@pytest.mark.parametrize("family", ["llama", "qwen2"], ids=["tied", "untied"])
def test_gradients_added_in_place_are_those_of_autograd(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch, family: str, loss: str
) -> None:
    calls = []

    def add(inputs: torch.Tensor, d_out: torch.Tensor, sums: torch.Tensor) -> None:
        calls.append(sums.shape)
        compat._add_weight_gradient(inputs, d_out, sums)

    product = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", product, raising=False)
    expected = gradients(view, family, loss, fused=False)
    assert calls == []
    found = gradients(view, family, loss, fused=True)
    assert len(calls) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
