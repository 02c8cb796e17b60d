"""Both ways to compute a mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.hf.experts import Experts as Sizes
from dms_train.inference.llm import LLM
from dms_train.inference.models.experts import Experts, MixtureOfExperts
from dms_train.inference.options import SamplingParams
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    random_ids,
    tiny_architecture,
    varied_weights,
    write_folder,
)

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


def test_a_model_with_one_expert_is_a_model_with_an_mlp(tmp_path: Path) -> None:
    sizes = Sizes(count=1, topk=1, ffn_hidden_size=16, normalize=False)
    a = replace(tiny_architecture("qwen3_moe"), experts=sizes)
    weights = varied_weights(a, 0)
    write_folder(tmp_path / "experts", a, None, weights)
    plain = replace(a, family="qwen3", experts=None, ffn_hidden_size=16)
    renamed = {name.replace("experts.0.", ""): w for name, w in weights.items()}
    dense = {name: w for name, w in renamed.items() if ".gate." not in name}
    write_folder(tmp_path / "mlp", plain, None, dense)
    greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    found, same = (
        LLM(tmp_path / name).generate([random_ids(9, seed=1)], greedy)[0].outputs[0].token_ids
        for name in ("experts", "mlp")
    )
    assert found == same


@pytest.mark.parametrize("way", ["_grouped", "_every_expert"])
def test_experts_may_have_biases_and_clamped_gates(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    a = tiny_architecture("gpt_oss")
    module = MixtureOfExperts(a).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    monkeypatch.setattr(Experts, "forward", getattr(Experts, way))
    named = {f"gate.{name}": value for name, value in module.gate.named_parameters()}
    stacked, bias = module.experts.gate_up_proj, module.experts.gate_up_bias
    for n in range(a.experts.count):
        at = f"experts.{n}."
        for half, projection in enumerate(("gate_proj", "up_proj")):
            named[f"{at}{projection}.weight"] = stacked[n].chunk(2)[half]
            named[f"{at}{projection}.bias"] = bias[n].chunk(2)[half]
        named[f"{at}down_proj.weight"] = module.experts.down_proj[n]
        named[f"{at}down_proj.bias"] = module.experts.down_bias[n]
    x = 4 * tokens() - 2
    truth = hf._biased_mixture(x.double(), lambda name: named[name].double(), a)
    assert (x @ stacked[0].T).abs().max() > 10  # beyond the clamps
    torch.testing.assert_close(module(x).double(), truth, rtol=1e-4, atol=1e-3)


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
