"""The cost of zeroing a channel, compared with transformers in float64."""

from __future__ import annotations

import pytest
import torch

from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.spec import PRESETS
from tests.support import channel_cases, tiny

CASES = [("llama", "dms"), ("qwen2", "dms"), ("qwen3", "dms"), ("qwen2", "dmc")]


def engine(view: ParallelView, family: str, preset: str) -> McoreEngine:
    a = channel_cases.architecture(family)
    options = TrainEngineOptions(parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=7)
    source = channel_cases.random_weights(a)
    return McoreEngine(a, PRESETS[preset], view, options, source)


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_the_cost_of_every_channel_is_that_of_transformers(
    view: ParallelView, family: str, preset: str
) -> None:
    built = engine(view, family, preset)
    built.attach_teacher(None)
    before = {name: tensor.clone() for name, tensor in built.hf_tensors()}
    batches = [tiny.batch(first).first(2, tiny.LENGTH) for first in (0, 2)]
    d = built.architecture.kv_channels
    found = built.channel_losses([*range(d - 1), -1], batches)
    source = channel_cases.random_weights(built.architecture)
    exact = channel_cases.divergences(built.architecture, preset, source, batches)
    assert max(exact) > 1.2 * min(exact) > 0.01
    assert found == pytest.approx(exact, abs=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.hf_tensors())


def test_without_a_teacher_the_cost_is_the_cross_entropy(view: ParallelView) -> None:
    built = engine(view, "llama", "dms")
    batch = tiny.batch(0).first(2, tiny.LENGTH)
    (found,) = built.channel_losses([3], [batch])
    a, source = built.architecture, channel_cases.random_weights(built.architecture)
    model = channel_cases.zeroed(channel_cases.model_of(a, source), a, "dms", 3)
    logits = model(batch.tokens).logits
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert found == pytest.approx(exact.item(), abs=1e-5)


def test_the_chosen_channel_decides_in_every_layer(view: ParallelView) -> None:
    built = engine(view, "llama", "dms")
    built.set_channel(5)
    assert built.spec.channel == 5
    for layer in built._models[0].decoder.layers:
        assert layer.self_attention.method.layer.spec.channel == 5
    built.reset_eviction_channel()
    rows = dict(built.hf_tensors())["model.layers.0.self_attn.q_proj.weight"].view(4, 2, 8, -1)
    assert not rows[:, 0, 5].any()
    assert rows[:, 0, :5].any(-1).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_teacher_of_a_chosen_channel_is_that_of_a_known_one(
    view: ParallelView, preset: str
) -> None:
    """Kernels round a head otherwise for another channel, so a resumed run would differ."""
    chooses, resumed = engine(view, "llama", preset), engine(view, "llama", preset)
    resumed.set_channel(5)
    for built in (chooses, resumed):
        built.attach_teacher(channel_cases.random_weights(built.architecture))
    chooses.set_channel(5)
    of_both = [built._models[0]._teacher[0].method.spec for built in (chooses, resumed)]
    assert of_both[0] == of_both[1]
