"""From a borrowed activation to soft, straight-through and hard decisions."""

from __future__ import annotations

import pytest
import torch

from dms_train.method import decisions
from dms_train.method.spec import PRESETS


def query(r: int = 3, d: int = 4) -> torch.Tensor:
    """[s=5, b=2, g=2, r, d]."""
    return torch.randn(5, 2, 2, r, d, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channel", [0, -1])
def test_eviction_channel_is_one_channel_of_the_first_query_head_of_each_group(
    channel: int,
) -> None:
    q = query()
    eviction_channel = decisions.eviction_channel(q, channel)
    assert eviction_channel.shape == (5, 2, 2)
    assert torch.equal(eviction_channel, q[:, :, :, 0, channel % 4])


@pytest.mark.parametrize("channel", [0, -1])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_scaling_touches_the_eviction_channel_alone_and_exactly(
    channel: int, factor: float
) -> None:
    q = query()
    before = q.clone()
    scaled = decisions.scale_eviction_channel(q, channel, factor)
    assert torch.equal(q, before)
    expected = before.clone()
    expected[..., 0, channel] *= factor
    assert torch.equal(scaled, expected)


def test_scaling_sends_the_factor_into_the_gradient_of_the_eviction_channel() -> None:
    q = query().requires_grad_()
    decisions.scale_eviction_channel(q, 0, 0.25).sum().backward()
    assert q.grad is not None
    assert (q.grad[..., 0, 0] == 0.25).all()
    assert (q.grad[..., 1:, :] == 1).all()


def test_logits_are_scale_times_eviction_channel_less_offset_in_float32() -> None:
    spec = PRESETS["dms"].override(alpha_scale=100.0, alpha_offset=5.0)
    eviction_channel = torch.tensor([0.0, 0.05, 0.0625, -1.0], dtype=torch.bfloat16)
    logits = decisions.eviction_logits(eviction_channel, spec)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, 100.0 * eviction_channel.float() - 5.0)
    assert decisions.eviction_logits(eviction_channel.double(), spec).dtype == torch.float64


def test_a_eviction_channel_of_zero_gives_minus_the_offset_exactly() -> None:
    for spec in PRESETS.values():
        logits = decisions.eviction_logits(torch.zeros(3), spec)
        assert logits.tolist() == [-spec.alpha_offset] * 3


def test_relaxation_is_the_sigmoid_of_the_noisy_logit_over_tau() -> None:
    x = torch.tensor([-2.0, 0.0, 0.3], dtype=torch.float64)
    noise = torch.tensor([1.9, 0.0, -0.1], dtype=torch.float64)
    alpha, log_keep, _ = decisions.relax(x, noise, 0.1)
    expected = 1 / (1 + torch.exp(-torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)))
    torch.testing.assert_close(alpha, expected)
    torch.testing.assert_close(log_keep, torch.log(1 - expected))


def test_log_keep_stays_finite_where_alpha_rounds_to_one() -> None:
    alpha, log_keep, _ = decisions.relax(torch.tensor([50.0]), None, 0.1)
    assert alpha.item() == 1.0
    assert log_keep.item() == -500.0


def test_straight_through_is_hard_forward_with_the_soft_gradient() -> None:
    x = torch.linspace(-1, 1, 41).requires_grad_()
    noise = torch.randn(41, generator=torch.Generator().manual_seed(1)) * 0.3
    alpha, _, straight_through = decisions.relax(x, noise, 0.1)
    assert torch.equal(straight_through.detach(), (x.detach() + noise > 0).float())
    weights = torch.arange(41.0)
    (soft,) = torch.autograd.grad((alpha * weights).sum(), x, retain_graph=True)
    (hard,) = torch.autograd.grad((straight_through * weights).sum(), x)
    assert torch.equal(soft, hard)
    assert soft.abs().max() > 1


def test_the_inference_rule_evicts_above_zero_only() -> None:
    assert decisions.hard_decisions(torch.tensor([-1e-9, 0.0, 1e-9])).tolist() == [
        False,
        False,
        True,
    ]
