"""Both ways to compute a mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.hf.architecture import Experts as Sizes
from dms_train.inference.models.experts import Experts, MixtureOfExperts
from tests.unit.inference.conftest import tiny_architecture

TOKENS = 9
BARS = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def mixture(*, normalize: bool) -> MixtureOfExperts:
    """Five experts, two for each token; no token of `tokens` chooses the last one."""
    sizes = Sizes(count=5, topk=2, ffn_hidden_size=16, normalize=normalize)
    module = MixtureOfExperts(replace(tiny_architecture("qwen3_moe"), experts=sizes))
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for weight in module.parameters():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    module.gate.weight[4] = -module.gate.weight[:4].amax(0).abs() - 1
    return module


def tokens() -> Tensor:
    return torch.rand(TOKENS, 32, generator=torch.Generator().manual_seed(5))


def expected(module: MixtureOfExperts, x: Tensor, *, normalize: bool) -> Tensor:
    gate, up_proj, down_proj = (weight.double() for weight in module.parameters())
    rows = []
    for token in x.double():
        shares = (gate @ token).softmax(-1)
        best = shares.argsort(descending=True)[:2].tolist()
        assert 4 not in best
        scale = shares[best].sum() if normalize else 1.0
        outputs = []
        for expert in best:
            g, u = (up_proj[expert] @ token).chunk(2)
            outputs.append(shares[expert] / scale * (down_proj[expert] @ (F.silu(g) * u)))
        rows.append(sum(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("way", ["_grouped", "_every_expert"])
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_passes_through_its_best_experts(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype, normalize: bool
) -> None:
    module, x = mixture(normalize=normalize).to(dtype), tokens().to(dtype)
    monkeypatch.setattr(Experts, "forward", getattr(Experts, way))
    truth = expected(module, x, normalize=normalize)
    difference = (module(x).double() - truth).abs().max() / truth.abs().max()
    assert difference < BARS[dtype]
