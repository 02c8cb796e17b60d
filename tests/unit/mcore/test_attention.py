"""The eviction channel in the real attention module, against explicit formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.families import FAMILIES
from dms_train.kernels.train_attention import reference
from dms_train.kernels.train_attention.reference import dms_attention
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.layers.attention import MethodSelfAttention, MethodState
from dms_train.method.dms.attention import DMSLayer
from dms_train.method.noise import logistic_noise, sample_keys
from dms_train.method.plan import StepPlan
from tests.support import tiny
from tests.support.matrix import combinations

PRESETS = ("dms", "dms_nvidia", "dms_fastdms")
S, B = 11, 2
FACTORS = (1.0, 0.5, 0.3, 0.0)

Build = Callable[..., McoreEngine]


def attention_of(engine: McoreEngine, layer: int = 0) -> Any:
    return engine._models[0].decoder.layers[layer].self_attention


def rope(engine: McoreEngine) -> Tensor:
    model = engine._models[0]
    return model._of_whole_heads(model.rotary_pos_emb.get_emb(S))


def rotate(x: Tensor, share: float = 1.0, base: float = 10000.0) -> Tensor:
    """RoPE in float64 on x [s, ..., d], halves rotated against each other, in a share of each."""
    d = x.shape[-1]
    turned = round(share * d)
    frequencies = base ** -(torch.arange(0, turned, 2).double() / turned)
    frequencies = torch.cat([frequencies, torch.zeros((d - turned) // 2).double()])
    angle = torch.arange(x.shape[0]).double()[:, None] * frequencies
    angle = angle.view(x.shape[0], *[1] * (x.dim() - 2), d // 2)
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def cleared(x: Tensor, channel: int) -> Tensor:
    x = x.clone()
    x[..., 0, channel] = 0
    return x


def query(d: int = 4) -> Tensor:
    """[s, b, g=4, r=2, d]."""
    return torch.randn(S, B, 4, 2, d, generator=torch.Generator().manual_seed(0))


def rotated(engine: McoreEngine, q: Tensor, factor: float) -> Tensor:
    engine._method.set_plan(StepPlan(channel_scale=factor))
    layer, step = engine._method.layer, attention_of(engine)._pass(rope(engine))
    assert isinstance(layer, DMSLayer)
    return layer.rotate(q, q[..., 0, :], step)[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_ramp_starts_at_plain_rope_and_ends_with_the_eviction_channel_cleared(
    build: Build, preset: str
) -> None:
    engine, q = build("llama", preset, trains=False), query()
    spec = engine.spec
    torch.testing.assert_close(rotated(engine, q, 1.0).double(), rotate(q), rtol=0, atol=1e-6)
    end = rotate(cleared(q, spec.channel))
    if spec.clear_after_rope:
        end = cleared(end, spec.channel)
    torch.testing.assert_close(rotated(engine, q, 0.0).double(), end, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_factor_acts_once_on_every_path_through_the_eviction_channel(
    build: Build, preset: str, factor: float
) -> None:
    engine, q = build("llama", preset, trains=False), query()
    spec = engine.spec
    end = rotate(cleared(q, spec.channel))
    if spec.clear_after_rope:
        end = cleared(end, spec.channel)
    expected = end + factor * (rotate(q) - end)
    got = rotated(engine, q, factor).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_clearing_after_rope_as_well_is_not_the_same_as_before_alone(build: Build) -> None:
    q = query()
    before = rotated(build("llama", "dms_nvidia", trains=False, clear_after_rope=False), q, 0.5)
    both = rotated(build("llama", "dms_nvidia", trains=False), q, 0.5)
    assert (before - both).abs().max() > 0.1


def explicit_context(
    engine: McoreEngine, hidden: Tensor, keys: Tensor, plan: StepPlan, layer: int
) -> tuple[Tensor, Tensor]:
    """Output of the core attention and eviction statistics, from the projections on."""
    attention, spec = attention_of(engine, layer), engine._method.options
    is_gated = engine.architecture.described.output_gate
    tensors = attention.get_query_key_value_tensors(hidden, output_gate=is_gated)
    q, k, v, *gate = (x.detach() for x in tensors)
    grouped = q.view(S, B, 4, 2, -1)
    x = spec.alpha_scale * grouped[..., 0, spec.channel] - spec.alpha_offset
    z = (x + logistic_noise(keys, layer + 1, S, 4, 0)) / spec.tau
    hard = x > 0
    alpha = torch.sigmoid(z) if plan.eviction == "soft" else hard.float()
    log_keep = -torch.nn.functional.softplus(z)
    if plan.eviction == "hard":
        log_keep = torch.where(hard, -torch.inf, 0.0)
    by_key = torch.zeros(B, 4, S)
    kept = log_keep.permute(1, 2, 0)
    by_key[..., : S - spec.decision_shift] = kept[..., spec.decision_shift :]
    share = engine.architecture.partial_rotary_factor
    turned = rotate(cleared(grouped, spec.channel), share)
    if spec.clear_after_rope:
        turned = cleared(turned, spec.channel)
    heads = turned.flatten(2, 3).transpose(0, 1)
    sinks = attention.core_attention.softmax_offset
    out = dms_attention(
        heads,
        rotate(k, share).transpose(0, 1),
        v.double().transpose(0, 1),
        by_key.double(),
        spec.window,
        q.shape[-1] ** -0.5,
        sinks=None if sinks is None else sinks.detach().double(),
    )
    if plan.eviction == "soft" and spec.alpha_in_loss == "hard_st":
        alpha = (z > 0).float()
    context = out.transpose(0, 1).flatten(2)
    context = context * gate[0].flatten(2).double().sigmoid() if is_gated else context
    return context, alpha.sum((0, 2))


@pytest.mark.parametrize(
    ("family", "preset", "eviction"), combinations(FAMILIES, PRESETS, ("soft", "hard"))
)
def test_a_layer_attends_according_to_its_decisions(
    build: Build, family: str, preset: str, eviction: str
) -> None:
    plain_rope = {"rope_scaling": None}
    engine = build(family, preset, trains=False, sizes=plain_rope, alpha_offset=0.5)
    plan = StepPlan(channel_scale=0.0, eviction=eviction)
    engine._method.set_plan(plan)
    layer = 1
    attention = attention_of(engine, layer)
    hidden = torch.randn(S, B, 32, generator=torch.Generator().manual_seed(2))
    keys = sample_keys(7, 3, torch.tensor([4, 9]))
    attention.noise_keys = keys
    with torch.no_grad():
        out, _ = attention(hidden, rotary_pos_emb=rope(engine))
    context, alpha_sum = explicit_context(engine, hidden, keys, plan, layer)
    expected = context @ attention.linear_proj.weight.detach().double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention.eviction_stats[:, 0], alpha_sum, rtol=1e-4, atol=1e-4)
    assert alpha_sum.min() > 0
    assert alpha_sum.max() < 4 * S


def decide(attention: MethodSelfAttention) -> tuple[torch.Tensor | None, torch.Tensor]:
    """log(1 - alpha) by key and statistics of decisions with logits of -offset."""
    channel = torch.zeros(S, B, 4)
    return attention._account(
        attention.method.layer.decide(channel, attention._pass(None)), channel
    )


def test_without_evictions_the_side_sums_are_those_of_a_dense_cache(build: Build) -> None:
    engine = build("llama", "dms", trains=False)
    engine._method.set_plan(StepPlan())
    log_keep, eviction_stats = decide(attention_of(engine))
    assert log_keep is None
    assert eviction_stats.tolist() == [[0.0, 4 * S, 4 * (S + 1) / 2]] * B


@pytest.mark.parametrize("preset", PRESETS)
def test_evicting_everything_leaves_a_sliding_window(build: Build, preset: str) -> None:
    engine = build("llama", preset, trains=False)
    engine._method.set_plan(StepPlan(channel_scale=0.0, eviction="all"))
    log_keep, eviction_stats = decide(attention_of(engine))
    assert log_keep is not None
    shift, window = engine.spec.decision_shift, engine.spec.window
    assert (log_keep[..., : S - shift] == -torch.inf).all()
    assert (log_keep[..., S - shift :] == 0).all()
    reads = sum(min(i, window + 1) for i in range(1, S + 1))
    expected = torch.tensor([S * 4.0, 4 * (window + 1), 4 * reads / S])
    torch.testing.assert_close(eviction_stats, expected.expand(B, 3))


def test_noise_belongs_to_the_global_sample_and_step(build: Build) -> None:
    engine = build("llama", "dms", trains=False)
    engine._method.set_plan(StepPlan(eviction="soft", channel_scale=0.0))
    attention = attention_of(engine)
    keys = sample_keys(7, 3, torch.tensor([4, 9]))
    attention.noise_keys = keys
    both, _ = decide(attention)
    attention.noise_keys = keys.flip(0)
    swapped, _ = decide(attention)
    assert torch.equal(both.flip(0), swapped)
    attention.noise_keys = sample_keys(7, 4, torch.tensor([4, 9]))
    later, _ = decide(attention)
    assert not torch.equal(both, later)


def test_tokens_after_a_position_do_not_change_its_logits(build: Build) -> None:
    engine = build("llama", "dms", trains=False, alpha_offset=0.5)
    tokens = tiny.batch(3, 1).tokens[0]
    plan = StepPlan(channel_scale=0.0, eviction="hard")
    whole, shorter = engine.record(plan, tokens), engine.record(plan, tokens[:15])
    assert whole is not None
    assert shorter is not None
    assert 0.1 < (whole.decision_logits > 0).float().mean() < 0.9
    torch.testing.assert_close(whole.logits[:15], shorter.logits, rtol=1e-5, atol=1e-5)


def test_the_engine_attends_with_the_configured_backend(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args[4])
        return dms_attention(*args)

    monkeypatch.setattr(reference, "dms_attention", counted)
    tokens = tiny.batch(3, 1).tokens[0]
    plan = StepPlan(channel_scale=0.0, eviction="hard")
    expected = build("llama", "dms", trains=False, kernels="reference").record(plan, tokens)
    assert calls == [4, 4]  # the window, in each of two layers
    chosen = build("llama", "dms", trains=False).record(plan, tokens)
    assert len(calls) == 2
    assert expected is not None
    assert chosen is not None
    torch.testing.assert_close(expected.logits, chosen.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compiles the kernels")
@pytest.mark.parametrize("eviction", ["soft", "hard", "none"])
@pytest.mark.parametrize(
    ("family", "preset", "window"),
    [
        ("llama", "dms", None),
        ("qwen3", "dms_nvidia", None),
        ("llama", "dmc", None),
        ("qwen3", "dmc_hardc", None),
        ("qwen3", "dms", 3),
    ],
)
def test_a_layer_with_fused_kernels_computes_what_torch_computes(
    build: Build, family: str, preset: str, window: int | None, eviction: str
) -> None:
    pytest.importorskip("triton")
    engine = build(family, preset, trains=False, alpha_offset=0.5)
    plan = StepPlan(channel_scale=0.25, eviction=eviction)
    attention = attention_of(engine)
    attention.core_attention.window = window  # of the layer; None in a layer of the method
    attention.noise_keys = sample_keys(7, 3, torch.tensor([4, 9]))
    hidden = torch.randn(S, B, 32, generator=torch.Generator().manual_seed(2))
    fused = MethodState(engine._method.options, engine._attend, fused_on=torch.device("cpu"))
    results = []
    for method in (engine._method, fused):
        method.set_plan(plan)
        attention.method = attention.core_attention.method = method
        with torch.no_grad():
            out, _ = attention(hidden, rotary_pos_emb=method.rope(rope(engine)))
        results.append((out, attention.eviction_stats))
    for plain, kernels in zip(*results, strict=True):
        torch.testing.assert_close(kernels, plain, rtol=1e-4, atol=1e-5)
