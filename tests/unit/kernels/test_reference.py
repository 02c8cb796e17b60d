"""The reference attention against an independent float64 loop."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.kernels import dispatch
from dms_train.kernels.train_attention.reference import dms_attention
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import align_to_keys, visible

B, S, D = 2, 9, 6
SCALE = 0.37


def spec(window: int, shift: int, eviction: str = "delayed") -> DMSSpec:
    return PRESETS["dms"].override(window=window, decision_shift=shift, eviction=eviction)


def inputs(hq: int, hk: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hq * 10 + hk)
    shapes = ((B, S, hq, D), (B, S, hk, D), (B, S, hk, D))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def alphas(hk: int) -> Tensor:
    """Decisions [b, hk, s] by deciding position, with exact zeros and ones among them."""
    generator = torch.Generator().manual_seed(hk)
    alpha = torch.rand(B, hk, S, generator=generator, dtype=torch.float64)
    alpha[alpha < 0.25] = 0.0
    alpha[alpha > 0.75] = 1.0
    return alpha


def log_keep(alpha: Tensor, s: DMSSpec) -> Tensor:
    return align_to_keys(torch.log1p(-alpha), s, keep=0.0)


def by_loop(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, s: DMSSpec) -> Tensor:
    """Each weight is exp(score) times 1 - alpha of the key's decision once it left the window."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    ratio = q.shape[2] // k.shape[2]
    delay = s.decision_shift + (s.window if s.eviction == "immediate" else 0)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(S):
                weights = []
                for j in range(i + 1):
                    score = sum((q[b, i, h, c] * k[b, j, h // ratio, c]).item() for c in range(D))
                    share = 1 - alpha[b, h // ratio, j + delay].item() if i - j > s.window else 1.0
                    weights.append(share * math.exp(score * SCALE))
                for j, weight in enumerate(weights):
                    out[b, i, h] += weight / sum(weights) * v[b, j, h // ratio]
    return out


CASES = [
    (1, 1, 1, 0, "delayed"),
    (4, 2, 3, 1, "delayed"),
    (4, 1, 2, 0, "delayed"),
    (2, 2, 7, 1, "delayed"),
    (3, 1, 8, 1, "delayed"),
    (4, 2, 3, 1, "immediate"),
    (2, 1, 1, 0, "immediate"),
]


@pytest.mark.parametrize(("hq", "hk", "window", "shift", "eviction"), CASES)
def test_output_equals_a_loop_over_weights(
    hq: int, hk: int, window: int, shift: int, eviction: str
) -> None:
    s = spec(window, shift, eviction)
    q, k, v = inputs(hq, hk)
    alpha = alphas(hk)
    expected = by_loop(q, k, v, alpha, s)
    out = dms_attention(q, k, v, log_keep(alpha, s), window, SCALE)
    assert (out - expected).abs().max() < 1e-12
    single = dms_attention(
        q.float(), k.float(), v.float(), log_keep(alpha, s).float(), window, SCALE
    )
    assert single.dtype == torch.float32
    assert (single - expected).abs().max() < 2e-6


@pytest.mark.parametrize(("hq", "hk"), [(4, 4), (4, 2), (6, 1)])
def test_without_evictions_it_is_plain_causal_attention(hq: int, hk: int) -> None:
    q, k, v = inputs(hq, hk, torch.float32)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *heads, is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    plain = dms_attention(q, k, v, None, 2, SCALE)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)
    kept = dms_attention(q, k, v, torch.zeros(B, hk, S), 2, SCALE)
    assert torch.equal(kept, plain)


@pytest.mark.parametrize("shift", [0, 1])
def test_hard_decisions_mask_exactly_the_invisible_keys(shift: int) -> None:
    s = spec(2, shift)
    q, k, v = inputs(4, 2)
    evicts = alphas(2) > 0.5
    mask = visible(evicts, s).repeat_interleave(2, dim=1)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE, enable_gqa=True)
    out = dms_attention(q, k, v, log_keep(evicts.double(), s), 2, SCALE)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_an_evicted_value_has_no_effect_even_if_it_is_huge() -> None:
    q, k, v = inputs(2, 1)
    evicts = torch.zeros(B, 1, S, dtype=torch.float64)
    evicts[:, :, 1] = 1.0
    huge = v.clone()
    huge[:, 0] = 1e30
    kept = log_keep(evicts, spec(2, 1))
    small, large = (dms_attention(q, k, x, kept, 2, SCALE) for x in (v, huge))
    assert torch.equal(small[:, 3:], large[:, 3:])
    assert not torch.equal(small[:, :3], large[:, :3])


def test_gradients_equal_finite_differences() -> None:
    s = spec(2, 1)
    q, k, v = (x[:1, :5].clone().requires_grad_() for x in inputs(4, 2))
    soft = alphas(2)[:1, :, :5].clamp(0.1, 0.9)
    kept = log_keep(soft, s).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: dms_attention(*x, window=2, scale=SCALE), (q, k, v, kept)
    )


def test_gradients_stay_finite_with_alpha_of_one() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 1))
    kept = log_keep(torch.ones(B, 1, S, dtype=torch.float64), spec(2, 1)).requires_grad_()
    dms_attention(q, k, v, kept, 2, SCALE).square().sum().backward()
    for x in (q, k, v, kept):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k, v = inputs(2, 1, torch.float32)
    out = dms_attention(q * 1e3, k * 1e3, v, torch.zeros(B, 1, S), 2, SCALE)
    assert out.isfinite().all()


def test_sixteen_bit_inputs_keep_their_dtype_and_get_single_precision_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 48, 4, 64, generator=generator).bfloat16() for _ in range(3))
    kept = torch.zeros(1, 4, 48).masked_fill(torch.arange(48) % 3 == 0, float("-inf"))
    out = dms_attention(4 * q, k, v, kept, 3, 0.125)
    assert out.dtype == torch.bfloat16
    exact = dms_attention(4 * q.double(), k.double(), v.double(), kept, 3, 0.125)
    # scores rounded to 16 bits would triple this error
    assert (out.double() - exact).norm() < 0.003 * exact.norm()


def test_backends_go_by_name() -> None:
    assert dispatch.train_attention("reference") is dms_attention
    with pytest.raises(KeyError):
        dispatch.train_attention("other")
