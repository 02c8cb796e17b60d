"""The fused kernels change no loss and no gradient; here they run in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see tests/gpu", allow_module_level=True)

from megatron.core import utils as megatron_utils

from dms_train.kernels import dispatch
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.residual import ResidualLayer
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import LoraOptions, OptimOptions, ParallelOptions, Trainable
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

Outcome = tuple[float, float, dict[str, torch.Tensor]]


def build(view: ParallelView, family: str, preset: str, recompute: str | None) -> McoreEngine:
    architecture = tiny.architecture(family, num_layers=2)
    spec = PRESETS[preset].override(window=4, alpha_offset=0.5)
    parallel = ParallelOptions(recompute_granularity=recompute)
    options = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7)
    eviction_channels = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.002)
    engine = McoreEngine(architecture, spec, view, options, eviction_channels)
    engine.attach_teacher(RandomWeights(architecture, 2, 0.2))
    return engine


def outcome(
    view: ParallelView, family: str, preset: str, recompute: str | None, *, packed: bool, **plan
) -> Outcome:
    engine = build(view, family, preset, recompute)
    batches = tiny.microbatches(0, 2, groups=2)
    if packed:
        batches = [tiny.packed(batch, [[11, 1, 9], [8, 16]]) for batch in batches]
    totals = engine.forward_backward(StepPlan(step=3, target_cr=8.0, **plan), batches)
    assert engine._method.fused == dispatch.can_fuse(
        dispatch.choose_train_attention("auto", view.device)
    )
    return totals.token_loss + totals.aux_loss, totals.reads, engine.hf_gradients()


@pytest.mark.parametrize(
    ("family", "preset", "recompute", "plan"),
    [
        ("llama", "dms", None, {"eviction": "soft", "channel_scale": 0.0}),
        (
            *("llama", "dms_nvidia", "full"),
            {
                **{"eviction": "soft", "channel_scale": 0.0, "packed": True},
                "layer_weights": (0.2, 1.1),
            },
        ),
        ("qwen3", "dms", None, {"eviction": "none", "channel_scale": 0.3, "packed": True}),
        ("qwen2", "dms_nvidia", "selective", {"eviction": "soft", "channel_scale": 0.0}),
        pytest.param(
            *("qwen3", "dms_fastdms", "full", {"eviction": "soft", "channel_scale": 0.0}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("qwen3", "dms_nvidia", None, {"eviction": "none", "channel_scale": 0.3}),
            marks=pytest.mark.slow,
        ),
        ("llama", "dms", "full", {"eviction": "hard", "channel_scale": 0.0}),
        ("gpt_oss", "dms", "full", {"eviction": "soft", "channel_scale": 0.0, "packed": True}),
        ("olmo3", "dms", "full", {"eviction": "soft", "channel_scale": 0.0, "packed": True}),
        ("qwen3_5_text", "dms", None, {"eviction": "soft", "channel_scale": 0.0, "packed": True}),
    ],
)
def test_a_step_is_the_same(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch, family, preset, recompute, plan
) -> None:
    plan = {"packed": False, **plan}
    loss, reads, gradients = outcome(view, family, preset, recompute, **plan)
    monkeypatch.setattr(dispatch, "can_fuse", lambda _: True)
    fused_loss, fused_reads, fused = outcome(view, family, preset, recompute, **plan)
    assert fused_loss == pytest.approx(loss, rel=1e-5)
    assert fused_reads == pytest.approx(reads, rel=1e-5)
    for name, gradient in gradients.items():
        worst = (fused[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30)
        assert worst < 1e-4, name


def frozen_base(view: ParallelView, train: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a student unlike the teacher with which it shares weights."""
    architecture = tiny.architecture("llama", num_layers=2)
    method = PRESETS["dms"].override(window=4, alpha_offset=0.5)
    options = TrainEngineOptions(
        parallel=ParallelOptions(),
        optim=OptimOptions(lr=1e-3),
        seed=7,
        trainable=Trainable(weights=train, lora=LoraOptions(rank=2)),
    )
    source = tiny.SmallEvictionChannels(architecture, 1, method.channel, factor=0.002)
    engine = McoreEngine(architecture, method, view, options, source)
    engine.attach_teacher(None)
    trained = {n: p for n, p in engine._models[0].named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data += noise * (1e-4 if "channel" in name else 0.02)
    plan = StepPlan(step=3, eviction="soft", channel_scale=0.0, target_cr=8.0)
    totals = engine.forward_backward(plan, [tiny.batch(0)])
    return totals.token_loss, {name: p.main_grad.clone() for name, p in trained.items()}


@pytest.mark.parametrize("train", ["attention", "channel", "lora"])
def test_a_step_on_a_frozen_base_is_the_same(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch, train: str
) -> None:
    loss, gradients = frozen_base(view, train)
    monkeypatch.setattr(dispatch, "can_fuse", lambda _: True)
    fused_loss, fused = frozen_base(view, train)
    assert loss > 1e-3
    assert fused_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        worst = (fused[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30)
        assert worst < 1e-4, name


def test_a_pass_without_gradients_records_nothing(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "can_fuse", lambda _: True)
    engine = build(view, "llama", "dms", None)
    engine._method.set_plan(StepPlan(eviction="none", channel_scale=1.0))
    model = engine._models[0]
    assert all(isinstance(layer, ResidualLayer) for layer in model.decoder.layers)
    model.decoder.final_layernorm = None  # it would return a tensor without a graph
    with torch.no_grad():
        hidden = torch.randn(8, 2, model.config.hidden_size)
        units = model.run_layers(hidden, torch.zeros(2, EVICTION_STATS), None)
        assert not any(output.requires_grad for output, _ in units)


def test_the_norm_of_many_gradients_is_megatrons() -> None:
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 100, 7)]
    flag = torch.zeros(1, dtype=torch.int)
    expected, _ = megatron_utils.local_multi_tensor_l2_norm(1, flag, [gradients], False)
    found, _ = compat._l2_norm(1, flag, [gradients], False)
    torch.testing.assert_close(found, expected)
    kept = [g.clone() for g in gradients]
    compat._scale(1, flag, [gradients, gradients], 0.25)
    assert all(torch.equal(g, k * 0.25) for g, k in zip(gradients, kept, strict=True))
