"""Subsets of the weights that train, and the teacher that shares the frozen ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import CheckpointError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters
from dms_train.mcore.options import LoraOptions, OptimOptions, ParallelOptions, Trainable
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny

LORA = LoraOptions(rank=2, alpha=8.0)
RATE = LearningRate(max_lr=1e-2, min_lr=1e-2, steps=3, warmup_steps=0, style="constant")
FAMILY = "qwen2"  # with biases
METHOD = PRESETS["dms"].override(window=4, alpha_offset=0.5)
KINDS = ("attention", "channel", "lora")


DENSE = tiny.architecture(FAMILY, num_layers=2)


def build(
    view: ParallelView,
    train: str,
    *,
    shared: bool = True,
    architecture: Architecture = DENSE,
    lora: LoraOptions = LORA,
    **changes: Any,
) -> McoreEngine:
    source = tiny.SmallEvictionChannels(architecture, 1, METHOD.channel)
    options = TrainEngineOptions(
        parallel=ParallelOptions(**changes),
        optim=OptimOptions(lr=1e-2),
        seed=7,
        trainable=Trainable(weights=train, lora=lora),
    )
    engine = McoreEngine(architecture, METHOD, view, options, source)
    engine.attach_teacher(None if shared else source)
    engine.begin_stage(RATE)
    return engine


def step(engine: McoreEngine, number: int) -> float:
    settings: dict[str, Any] = {"eviction": "soft", "channel_scale": 0.0, "target_cr": 4.0}
    if number == 0:
        settings = {"channel_scale": 0.5}
    plan = StepPlan(step=number, stage_step=number, **settings)
    return engine.train_step(plan, [tiny.batch(4 * number), tiny.batch(4 * number + 2)]).token_loss


def train(engine: McoreEngine, first: int = 0, last: int = 3) -> list[float]:
    losses = []
    for number in range(first, last):
        if number == 1:
            engine.reset_eviction_channel()
        losses.append(step(engine, number))
    return losses


def named(engine: McoreEngine) -> dict[str, Tensor]:
    return dict(engine._models[0].named_parameters())


def trains(name: str, kind: str) -> bool:
    """Tell by its name if a parameter should train."""
    if kind == "attention":
        parts = name.split(".")
        return parts[-2] in ("linear_qkv", "linear_proj")
    return ".lora_" in name or ".channel_" in name


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_cost_nothing_and_stay_as_they_are(view: ParallelView, kind: str) -> None:
    engine = build(view, kind)
    before = {name: p.detach().clone() for name, p in named(engine).items()}
    pointers = {name: p.data_ptr() for name, p in named(engine).items()}
    train(engine)
    chosen = {name for name in before if trains(name, kind)}
    assert chosen
    moved = {name for name, p in named(engine).items() if not torch.equal(p, before[name])}
    assert moved == chosen
    parameters = named(engine)
    part = compat.optimizer_parts(engine._optimizer)[0]
    held = {id(p) for p in part.model_param_group_index_map}
    assert held == {id(parameters[name]) for name in chosen}
    assert {name for name, p in parameters.items() if hasattr(p, "main_grad")} == chosen
    buffered = sum(buffer.grad_data.numel() for buffer in engine._chunks[0].buffers)
    assert buffered <= sum(parameters[name].numel() + 64 for name in chosen)  # aligned
    dict(engine.hf_tensors())  # merges, and restores the same memory
    frozen = before.keys() - chosen
    assert all(parameters[name].data_ptr() == pointers[name] for name in frozen)
    assert all(torch.equal(parameters[name], before[name]) for name in frozen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_shared_teacher_equals_a_separate_one(
    view: ParallelView, kind: str, recompute: str | None
) -> None:
    shared, separate = (
        train(build(view, kind, shared=shared, recompute_granularity=recompute))
        for shared in (True, False)
    )
    assert shared == pytest.approx(separate, abs=1e-6)
    assert max(shared) > 1e-3  # the student differs from its teacher


def test_a_shared_teacher_holds_originals_of_trained_projections_alone(view: ParallelView) -> None:
    for kind in ("attention", "channel", "lora"):
        teacher = build(view, kind)._models[0].teacher
        names = [original.name for original in teacher._originals]
        # of two layers: weight and bias of q, k, v, and the weight of o
        assert names == (2 * ["weight", "weight", "bias"] if kind == "attention" else [])


def reference(module: Any, x: Tensor, values: dict[str, Tensor]) -> Tensor:
    """The adapted projection, from its definition, one head at a time."""
    a = tiny.architecture(FAMILY)
    d, per_group = a.kv_channels, a.num_attention_heads // a.num_query_groups
    heads = {"q": per_group, "k": 1, "v": 1}
    delta = {
        t: LORA.alpha / LORA.rank * values[f"lora_{t}_up"] @ values[f"lora_{t}_down"] for t in heads
    }
    rows, bias = [], []
    width = (per_group + 2) * d
    for group in range(a.num_query_groups):
        start = group * width
        for target, count in heads.items():
            own = slice(group * count * d, (group + 1) * count * d)
            rows.append(module.weight[start : start + count * d] + delta[target][own])
            bias.append(module.bias[start : start + count * d])
            start += count * d
    weight, offset = torch.cat(rows), torch.cat(bias)
    for group in range(a.num_query_groups):
        at = group * width + METHOD.channel % d
        weight = torch.cat([weight[:at], values["channel_weight"][group][None], weight[at + 1 :]])
        offset = torch.cat([offset[:at], values["channel_bias"][group][None], offset[at + 1 :]])
    return F.linear(x, weight, offset)


def test_values_and_gradients_of_adapters_are_those_of_plain_torch(view: ParallelView) -> None:
    engine = build(view, "lora")
    attention = engine._models[0].decoder.layers[1].self_attention
    torch.manual_seed(3)
    for module in (attention.linear_qkv, attention.linear_proj):
        module.double()
        trained = {n: p for n, p in module.named_parameters() if adapters.is_adapter(n)}
        for parameter in trained.values():
            torch.nn.init.normal_(parameter)
        values = {n: p.detach().clone().requires_grad_() for n, p in trained.items()}
        x, twin = (torch.randn(5, 2, module.input_size).double() for _ in range(2))
        twin = x.clone().requires_grad_()
        x.requires_grad_()
        if "channel_weight" in trained:
            expected = reference(module, twin, values)
        else:
            delta = LORA.scale * values["lora_o_up"] @ values["lora_o_down"]
            expected = twin @ (module.weight + delta).t()
        found = module(x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        weights = torch.randn_like(expected)
        wanted = torch.autograd.grad((expected * weights).sum(), [twin, *values.values()])
        got = torch.autograd.grad((found * weights).sum(), [x, *trained.values()])
        for name, mine, theirs in zip(["x", *trained], got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11, msg=name)
        # the export computes the same
        module.merge()
        torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=1e-4)
        module.unmerge()


@pytest.mark.parametrize(("dtype", "digits"), [("fp32", 24), ("bf16", 8)])
def test_an_export_is_the_base_and_its_adapters_rounded_once(
    view: ParallelView, dtype: str, digits: int
) -> None:
    engine = build(view, "lora", params_dtype=dtype)
    train(engine)
    a = tiny.architecture(FAMILY, num_layers=2)
    source = tiny.SmallEvictionChannels(a, 1, METHOD.channel)
    trained = {n: p.detach().double() for n, p in named(engine).items() if adapters.is_adapter(n)}
    heads = range(0, a.num_attention_heads, a.num_attention_heads // a.num_query_groups)
    rows = [head * a.kv_channels + METHOD.channel % a.kv_channels for head in heads]
    for name, tensor in engine.hf_tensors():
        expected = source.get(name).to(tensor.dtype).double()
        layer, _, target = name.removeprefix("model.layers.").partition(".self_attn.")
        projection = "linear_proj" if target[:1] == "o" else "linear_qkv"
        prefix = f"decoder.layers.{layer}.self_attention.{projection}."
        if target.endswith("weight"):
            up, down = (trained[f"{prefix}lora_{target[0]}_{part}"] for part in ("up", "down"))
            expected = expected + LORA.alpha / LORA.rank * up @ down
            assert up.abs().max() > 0
        if target.startswith("q_"):
            expected[rows] = trained[f"{prefix}channel_{target.rpartition('.')[2]}"]
        # half a unit in the last place, and the rounding of the sum in fp32
        error = (tensor.double() - expected).abs()
        assert (error <= 2.0**-digits * expected.abs() + 1e-6).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_and_its_export_continue_bit_by_bit(
    view: ParallelView, kind: str, tmp_path: Any
) -> None:
    whole = build(view, kind)
    train(whole)
    first = build(view, kind)
    train(first, 0, 2)
    first.save(tmp_path / "checkpoint", {})
    resumed = build(view, kind)
    resumed.load(tmp_path / "checkpoint", with_optimizer=True)
    train(resumed, 2, 3)
    expected, found = dict(whole.hf_tensors()), dict(resumed.hf_tensors())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # a saved model without an optimizer has no adapters and is the same model
    resumed.save_weights(tmp_path / "weights", {})
    plain = build(view, "all")
    plain.load(tmp_path / "weights", with_optimizer=False)
    found = dict(plain.hf_tensors())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plan = StepPlan(channel_scale=0.0, eviction="hard")
    mine, theirs = (engine.record(plan, tiny.batch(0).tokens[0]) for engine in (resumed, plain))
    assert torch.equal(mine.logits, theirs.logits)
    assert (mine.decision_logits > 0).any()
    trainable = Trainable(weights=kind, lora=LORA)
    assert Trainable.of(trainable.adapters()).adapters() == trainable.adapters()
    if kind != "attention":
        refusal = f"adapters of method.train={kind}.*, and this run has method.train=all; .*export"
        with pytest.raises(CheckpointError, match=refusal):
            plain.load(tmp_path / "checkpoint", with_optimizer=False)


@pytest.mark.parametrize("targets", [(), ("o",), ("q",)])
def test_a_layer_with_a_window_has_no_trained_channel(
    view: ParallelView, targets: tuple[str, ...], tmp_path: Any
) -> None:
    full = LayerAttention(rotary_base=1e4)
    layers = (full, LayerAttention(rotary_base=1e4, window=7))
    lora = replace(LORA, targets=targets) if targets else LORA
    how = {
        "train": "lora" if targets else "channel",
        "architecture": replace(DENSE, layers=layers),
        "lora": lora,
    }
    engine = build(view, **how)
    before = dict(engine.hf_tensors())
    train(engine)
    engine.save(tmp_path / "checkpoint", {})
    resumed = build(view, **how)
    resumed.load(tmp_path / "checkpoint", with_optimizer=True)
    trained = dict(resumed.hf_tensors())
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, before[name])}
    own = ["0.self_attn.q_proj.weight", "0.self_attn.q_proj.bias"]
    own += [f"{layer}.self_attn.{target}_proj.weight" for layer in (0, 1) for target in targets]
    assert changed == {f"model.layers.{name}" for name in own}
    assert all(torch.equal(trained[name], tensor) for name, tensor in engine.hf_tensors())


def test_ranking_channels_leaves_the_teacher_and_the_student_as_they_are(
    view: ParallelView,
) -> None:
    losses = {}
    for kind in ("all", "attention", "channel", "lora"):
        engine = build(view, kind)
        before = {name: p.detach().clone() for name, p in named(engine).items()}
        losses[kind] = engine.channel_losses([0, 1, -1], [tiny.batch(0)])
        assert all(torch.equal(p, before[name]) for name, p in named(engine).items())
        engine.set_channel(1)
        assert engine.evaluate(StepPlan(), [tiny.batch(0)]).loss == pytest.approx(0.0, abs=1e-6)
    assert max(losses["all"]) > 1e-2
    for kind in KINDS:
        assert losses[kind] == pytest.approx(losses["all"], abs=1e-6)
