"""Weights and logits are unchanged after conversion through every layout and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from dms_train.families import FAMILIES
from dms_train.method import decisions
from dms_train.method.noise import logistic_noise, sample_keys
from dms_train.method.visibility import align_to_keys
from tests.support import convert_worker as worker
from tests.support import launch, tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
COMMON = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": worker.VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "qwen3": {"tie_word_embeddings": True},
}
CASES = [(family, layout) for family in FAMILIES for layout in worker.LAYOUTS]


def random_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """Every weight random, also those that start at zero or one."""
    described = FAMILIES[family]
    kind = getattr(transformers, f"{described.classes}Config")
    values = {**described.fixed, **described.written}
    if described.always_has_head_dim:
        values["head_dim"] = 12
    values |= {**CHANGES.get(family, {}), **changes}
    torch.manual_seed(3)
    config = kind(**{**COMMON, **values})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


def logits(model: transformers.PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(worker.tokens()[None]).logits[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("models")
    expected = {}
    for family in FAMILIES:
        model = random_model(family)
        model.save_pretrained(folder / family)
        expected[family] = logits(model)
    return folder, expected


@pytest.fixture(scope="module")
def results(
    models: tuple[Path, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("converted")
    arguments = ("tests.support.convert_worker", str(models[0]), str(out))
    launch.checked(launch.workers(worker.PROCESSES, *arguments, timeout=500))
    return out


def original(models: tuple[Path, dict[str, Tensor]], family: str) -> dict[str, Tensor]:
    return load_file(models[0] / family / "model.safetensors")


def test_the_models_have_the_features_of_their_names(
    models: tuple[Path, dict[str, Tensor]],
) -> None:
    assert "lm_head.weight" not in original(models, "llama")
    assert "lm_head.weight" in original(models, "qwen2")
    assert original(models, "qwen2")["model.layers.0.self_attn.q_proj.bias"].abs().min() > 0
    assert original(models, "qwen3")["model.layers.0.self_attn.q_norm.weight"].shape == (12,)
    plain = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert (logits(plain) - models[1]["llama"]).abs().max() > 0.01


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_weights_are_equal_bit_for_bit_after_conversion(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    expected = original(models, family)
    got = load_file(results / f"{family}-{layout}.safetensors")
    got.pop("logits")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_untouched_model_computes_the_logits_of_transformers(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    got = load_file(results / f"{family}-{layout}.safetensors")["logits"]
    expected = models[1][family]
    difference = (got - expected).abs().max().item()
    print(f"{family} {layout}: max |dlogit| {difference:.1e} of {expected.abs().max():.1f}")
    assert got.shape == expected.shape
    assert difference < 1e-4


@pytest.mark.parametrize("layout", worker.LOADED_IN)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_one_layout_loads_bit_for_bit_in_another(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    expected = original(models, family)
    got = load_file(results / f"{family}-{layout}-loaded.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def expected_shares() -> dict[str, Tensor]:
    """log(1 - alpha) of zero eviction channels for every layer, head and sample, by key."""
    samples = torch.arange(8)
    keys = sample_keys(worker.SEED, worker.STEP, samples)
    shares = {}
    for layer in range(1, 5):
        noise = logistic_noise(keys, layer, tiny.LENGTH, 4, 0)
        eviction_channel = decisions.eviction_logits(torch.zeros(noise.shape), worker.SPEC)
        _, log_keep, _ = decisions.relax(eviction_channel, noise, worker.SPEC.tau)
        by_key = align_to_keys(log_keep.permute(1, 2, 0), worker.SPEC, keep=0.0)
        for sample in samples.tolist():
            for head in range(4):
                shares[f"{layer}.{head}.{sample}"] = by_key[sample, head]
    return shares


@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_every_layout_relaxes_with_the_same_noise(results: Path, layout: str) -> None:
    got: dict[str, Tensor] = {}
    for rank in range(worker.PROCESSES):
        mine = load_file(results / f"shares-{layout}-{rank}.safetensors")
        assert not got.keys() & mine.keys()
        got |= mine
    expected = expected_shares()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], share) for name, share in expected.items())
