"""The model before and after the reset of the eviction channel.

Run with -s for the table of presets and families, with DMS_FULL_MATRIX=1 for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dms_train.families import FAMILIES
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.model import mapping
from dms_train.mcore.model.weights import RandomWeights
from dms_train.method import losses
from dms_train.method.noise import sample_keys
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.matrix import combinations

DMS_PRESETS = ("dms", "dms_nvidia", "dms_fastdms")
CASES = combinations(FAMILIES, DMS_PRESETS)
ZEROED = StepPlan(channel_scale=0.0, eviction="none", loss="lm")
HARD = StepPlan(channel_scale=0.0, eviction="hard", loss="lm")
RATE = LearningRate(max_lr=1e-3, min_lr=1e-3, steps=10, warmup_steps=0, style="constant")
MOMENTS = ("exp_avg", "exp_avg_sq")
SIGMOID = 1 / (1 + math.exp(5))
TAU = 0.1

Build = Callable[..., McoreEngine]


class Facts(NamedTuple):
    """Facts about one family and preset.

    before, after: logits of the last zeroing step and of the inference rule.
    decisions: decision logits after the reset.
    alpha: mean and standard error of what the compression loss counts in the first retrofit step.
    """

    before: Tensor
    after: Tensor
    decisions: Tensor
    alpha: tuple[float, float]


def counted_alpha(engine: McoreEngine) -> tuple[float, float]:
    """Over 2**20 draws with eviction channels of exactly zero."""
    engine._method.set_plan(StepPlan(channel_scale=0.0, eviction="soft"))
    layer = engine.architecture.method_layers[0] if engine.architecture.linear else 0
    attention = engine._models[0].decoder.layers[layer].self_attention
    length, samples, heads = 2048, 128, 4
    attention.noise_keys = sample_keys(7, 0, torch.arange(samples))
    with torch.no_grad():
        channel = torch.zeros(length, samples, heads)
        decided = attention.method.layer.decide(channel, attention._pass(None))
        _, eviction_stats = attention._account(decided, channel)
    means = eviction_stats[:, 0].double() / (length * heads)
    return means.mean().item(), (means.std() / math.sqrt(samples)).item()


def zeroing_steps(engine: McoreEngine, count: int = 3) -> None:
    engine.begin_stage(RATE)
    for step in range(count):
        factor = 1 - (step + 1) / (count + 1)
        plan = StepPlan(step=step, stage_step=step, channel_scale=factor, loss="lm")
        engine.train_step(plan, [tiny.batch(2 * step)])


def measure(build: Build, family: str, preset: str) -> Facts:
    engine = build(family, preset)
    engine.load_hf(
        RandomWeights(engine.architecture, 3, 0.2)
    )  # eviction channels as large as other channels
    zeroing_steps(engine)
    tokens = tiny.batch(5, 1).tokens[0]
    before = engine.record(ZEROED, tokens)
    engine.reset_eviction_channel()
    after = engine.record(HARD, tokens)
    assert before is not None
    assert after is not None
    return Facts(before.logits, after.logits, after.decision_logits, counted_alpha(engine))


@pytest.fixture(scope="module")
def facts(build: Build) -> dict[tuple[str, str], Facts]:
    table = {(f, p): measure(build, f, p) for f, p in CASES}
    print("\nfamily  preset       logits   mean alpha (standard error)  max|dlogit|  KL, nats")
    for (family, preset), f in table.items():
        jump, kl = difference(f)
        x = f.decisions.unique().tolist()
        alpha, error = f.alpha
        print(f"{family:7} {preset:12} {x}  {alpha:.6f} ({error:.6f})  {jump:.3e}  {kl:.3e}")
    return table


def difference(f: Facts) -> tuple[float, float]:
    kl = losses.kl_teacher_student(f.after.double(), f.before.double())
    return (f.after - f.before).abs().max().item(), kl.mean().item()


def mean_relaxed_alpha(x: float, tau: float) -> float:
    """The integral of sigmoid((x + n) / tau) over logistic n, by the midpoint rule."""
    u = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    return torch.sigmoid((x + torch.log(u) - torch.log1p(-u)) / tau).mean().item()


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_every_decision_logit_is_minus_the_offset_exactly(
    facts: dict[tuple[str, str], Facts], family: str, preset: str
) -> None:
    decisions = facts[family, preset].decisions
    layers = len(tiny.architecture(family, num_layers=2).method_layers)
    assert decisions.shape == (layers, 4, tiny.LENGTH)
    assert (decisions == -5.0).all()


def test_mean_relaxation_far_below_zero_is_the_sigmoid_stretched_by_the_temperature() -> None:
    stretch = math.pi * TAU / math.sin(math.pi * TAU)
    assert stretch == pytest.approx(1.0166, abs=1e-4)
    assert mean_relaxed_alpha(-5.0, TAU) == pytest.approx(SIGMOID * stretch, rel=1e-3)


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_the_first_retrofit_step_evicts_the_sigmoid_of_the_offset(
    facts: dict[tuple[str, str], Facts], family: str, preset: str
) -> None:
    mean, error = facts[family, preset].alpha
    expected = mean_relaxed_alpha(-5.0, TAU) if preset == "dms" else SIGMOID
    assert error < 0.02 * expected
    assert mean == pytest.approx(expected, abs=4 * error)


@pytest.mark.parametrize(
    ("family", "preset"), [case for case in CASES if not FAMILIES[case[0]].qk_norm]
)
def test_the_inference_rule_continues_the_last_zeroing_step(
    facts: dict[tuple[str, str], Facts], family: str, preset: str
) -> None:
    """Up to rounding: without decisions another attention kernel runs than with them."""
    f = facts[family, preset]
    torch.testing.assert_close(f.before, f.after, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "preset"), [case for case in CASES if FAMILIES[case[0]].qk_norm]
)
def test_with_query_norms_the_reset_changes_logits_little(
    facts: dict[tuple[str, str], Facts], family: str, preset: str
) -> None:
    """The norm divides by the size of the whole head, and one channel of 16 leaves it."""
    jump, kl = difference(facts[family, preset])
    assert jump > 0
    assert 0 < kl < 0.05


def projections(engine: McoreEngine) -> list[Any]:
    """Weights and biases of the layers on which the method acts."""
    every = engine._models[0].decoder.layers
    layers = [every[number] for number in engine.architecture.method_layers]
    weights = [layer.self_attention.linear_qkv.weight for layer in layers]
    return weights + [
        layer.self_attention.linear_qkv.bias
        for layer in layers
        if layer.self_attention.linear_qkv.bias is not None
    ]


def optimizer_tensors(engine: McoreEngine, parameter: Any) -> dict[str, Tensor]:
    (part,) = [
        p
        for p in compat.optimizer_parts(engine._optimizer)
        if parameter in p.model_param_group_index_map
    ]
    tensors = part._get_main_param_and_optimizer_states(parameter)
    shapes = {n: tensors[n].detach().view(parameter.shape).clone() for n in ("param", *MOMENTS)}
    return {**shapes, "weight": parameter.detach().clone()}


@pytest.mark.parametrize(
    ("family", "preset", "dtype"), combinations(FAMILIES, DMS_PRESETS, ("bf16", "fp32"))
)
def test_eviction_channel_rows_lose_weight_and_moments_and_others_lose_nothing(
    build: Build, family: str, preset: str, dtype: str
) -> None:
    engine = build(family, preset, dtype)
    zeroing_steps(engine)
    rows = mapping.eviction_channel_rows(engine.architecture, engine._method.layer, 4)
    others = [row for row in range(projections(engine)[0].shape[0]) if row not in rows]
    before = [optimizer_tensors(engine, p) for p in projections(engine)]
    engine.reset_eviction_channel()
    after = [optimizer_tensors(engine, p) for p in projections(engine)]
    layers = len(engine.architecture.method_layers)
    assert len(after) == (2 * layers if FAMILIES[family].qkv_bias else layers)
    for old, new in zip(before, after, strict=True):
        for name in ("weight", "param", *MOMENTS):
            assert old[name][rows].abs().max() > 0
            assert (new[name][rows] == 0).all()
            assert torch.equal(new[name][others], old[name][others])


def borrowed_rows(preset: str, name: str, engine: McoreEngine) -> list[int]:
    """Return the channel's rows of a tensor: in the first query head for DMS, in all for DMC.

    DMC also borrows the channel of every key.
    """
    a, spec = engine.architecture, PRESETS[preset]
    if "q_proj" in name:
        every = 1 if spec.kind == "dmc" else a.num_attention_heads // a.num_query_groups
        heads = range(0, a.num_attention_heads, every)
    elif "k_proj" in name and spec.kind == "dmc":
        heads = range(a.num_query_groups)
    else:
        heads = range(0)
    return [head * a.kv_channels + spec.channel % a.kv_channels for head in heads]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_reset_zeroes_the_borrowed_rows_of_every_method(build: Build, preset: str) -> None:
    engine = build("qwen2", preset)  # which has biases
    before = dict(engine.hf_tensors())
    engine.reset_eviction_channel()
    after = dict(engine.hf_tensors())
    borrowing = 0
    for name, old in before.items():
        rows = borrowed_rows(preset, name, engine)
        expected = old.clone()
        expected[rows] = 0
        assert torch.equal(after[name], expected), name
        borrowing += bool(rows and old[rows].abs().max() > 0)
    kinds = 2 if PRESETS[preset].kind == "dmc" else 1  # queries, and keys
    assert borrowing >= kinds * engine.architecture.num_layers


@pytest.mark.parametrize(("family", "dtype"), combinations(FAMILIES, ("fp32", "bf16")))
def test_a_step_that_does_not_decide_leaves_the_eviction_channel_at_zero(
    build: Build, family: str, dtype: str
) -> None:
    """Neither Adam's moments nor an fp32 copy of the weights restore the old values."""
    engine = build(family, "dms", dtype)
    zeroing_steps(engine)
    rows = mapping.eviction_channel_rows(engine.architecture, engine._method.layer, 4)
    engine.reset_eviction_channel()
    engine.train_step(StepPlan(step=3, channel_scale=0.0, loss="lm"), [tiny.batch(20)])
    for parameter in projections(engine):
        assert (parameter[rows] == 0).all()


def test_a_retrofit_step_moves_the_eviction_channel(build: Build) -> None:
    engine = build("llama", "dms")
    rows = mapping.eviction_channel_rows(engine.architecture, engine._method.layer, 4)
    engine.reset_eviction_channel()
    engine.begin_stage(RATE)
    plan = StepPlan(channel_scale=0.0, eviction="soft", target_cr=4.0, loss="lm")
    engine.train_step(plan, [tiny.batch(0, 8)])
    assert all(p[rows].abs().max() > 0 for p in projections(engine))
