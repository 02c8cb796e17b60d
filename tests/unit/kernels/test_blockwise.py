"""The blockwise attention against the reference, in float64 and in the precisions of training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dms_train.kernels.train_attention import blockwise, reference

LENGTHS = (1, 5, 63, 64, 65, 200)
HEADS = ((1, 1), (4, 2), (6, 2), (8, 1))


def problem(
    length: int, heads: tuple[int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Leaves q, k, v and log_keep, some of them exactly 0 and some far below; and d_out."""
    generator = torch.Generator().manual_seed(seed)
    (hq, hk), d = heads, 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    log_keep = -torch.rand(2, hk, length, generator=generator, dtype=torch.float64) * 4
    log_keep[log_keep > -1] = 0.0
    log_keep[log_keep < -3.5] = -300.0
    leaves = [normal(2, length, h, d) for h in (hq, hk, hk)]
    leaves.append(log_keep.to(torch.promote_types(dtype, torch.float32)))
    return [x.requires_grad_() for x in leaves], normal(2, length, hq, d)


def outcome(attention: object, leaves: list[Tensor], d_out: Tensor, window: int) -> list[Tensor]:
    out = attention(*leaves, window, 0.37)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("window", [1, 16, 64, 300])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_gradients_equal_the_reference(
    length: int, heads: tuple[int, int], window: int
) -> None:
    leaves, d_out = problem(length, heads, torch.float64)
    ours = outcome(blockwise.dms_attention, leaves, d_out, window)
    theirs = outcome(reference.dms_attention, leaves, d_out, window)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_hard_eviction_equals_the_reference(length: int) -> None:
    leaves, _ = problem(length, (4, 2), torch.float64)
    q, k, v, log_keep = (x.detach() for x in leaves)
    log_keep[log_keep < 0] = float("-inf")
    ours = blockwise.dms_attention(q, k, v, log_keep, 3, 0.37)
    torch.testing.assert_close(ours, reference.dms_attention(q, k, v, log_keep, 3, 0.37))


def test_the_gradient_of_a_bias_behind_the_window_is_not_zero() -> None:
    leaves, d_out = problem(200, (4, 2), torch.float64)
    *_, d_log_keep = outcome(blockwise.dms_attention, leaves, d_out, 16)
    assert (d_log_keep[..., : 200 - 17].abs() > 0).float().mean() > 0.8
    assert torch.equal(d_log_keep[..., 200 - 17 :], torch.zeros(2, 2, 17, dtype=torch.float64))


@pytest.mark.parametrize("heads", HEADS)
def test_without_a_bias_it_is_plain_causal_attention(heads: tuple[int, int]) -> None:
    leaves, d_out = problem(70, heads, torch.float64)
    qkv = leaves[:3]

    def dense(attention: object) -> list[Tensor]:
        out = attention(*qkv, None, 16, 0.37)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out, qkv, d_out)]

    for a, b in zip(dense(blockwise.dms_attention), dense(reference.dms_attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_lower_precisions_stay_near_float64(dtype: torch.dtype, tolerance: float) -> None:
    leaves, d_out = problem(200, (4, 2), dtype)
    ours = outcome(blockwise.dms_attention, leaves, d_out, 16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    theirs = outcome(reference.dms_attention, exact, d_out.double(), 16)
    assert ours[0].dtype == dtype
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("length", [5, 200])
def test_sinks_take_their_part_of_every_softmax(length: int, biased: bool) -> None:
    leaves, d_out = problem(length, (4, 2), torch.float64)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    bias = leaves.pop()

    def with_sinks(attention: object) -> list[Tensor]:
        heads = (*leaves, bias if biased else None)
        out = attention(*heads, 16, 0.37, sinks=sinks)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out, [*leaves, sinks], d_out)]

    ours, theirs = with_sinks(blockwise.dms_attention), with_sinks(reference.dms_attention)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_sink_is_a_key_with_a_fixed_score_and_no_value() -> None:
    leaves, _ = problem(30, (2, 2), torch.float64)
    q, k, v, _ = (x.detach() for x in leaves)
    sinks = torch.tensor([1.0, -1.0], dtype=torch.float64)
    out = reference.dms_attention(q, k, v, None, 16, 0.37, sinks=sinks)
    for i in range(30):
        scores = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, : i + 1]) * 0.37
        numerators = scores.exp()
        weights = numerators / (numerators.sum(-1) + sinks.exp())[..., None]
        expected = torch.einsum("bhj,bjhd->bhd", weights, v[:, : i + 1])
        torch.testing.assert_close(out[:, i], expected, rtol=1e-12, atol=1e-12)
