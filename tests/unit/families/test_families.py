"""The description of every family agrees with transformers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from dms_train import families
from dms_train.families import FAMILIES
from dms_train.families.decoder.parameters import layer_parameters
from dms_train.families.decoder.tensors import layer_tensors

LINEAR = [name for name, family in FAMILIES.items() if family.layers and family.layers.has_linear]
LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


def tiny_model(family):
    """Transformers' own model with the family's default configuration, on small sizes."""
    config = getattr(transformers, FAMILIES[family].config_class)(
        num_hidden_layers=4 if family in LINEAR else 1,
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=11,
        **({"num_experts": 3, "moe_intermediate_size": 12} if FAMILIES[family].has_experts else {}),
        **({"shared_expert_intermediate_size": 7} if FAMILIES[family].shares_expert else {}),
        **(LINEAR_SIZES if family in LINEAR else {}),
        **FAMILIES[family].written,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_named_like_its_module_and_its_classes_in_transformers(family):
    described = FAMILIES[family]
    assert importlib.import_module(f"dms_train.families.{family}").FAMILY is described
    config = getattr(transformers, described.config_class)
    assert config.model_type == described.name == family
    assert type(tiny_model(family)).__name__ == described.causal_lm


@pytest.mark.parametrize(
    ("family", "linear"), [*((f, False) for f in FAMILIES), *((f, True) for f in LINEAR)]
)
def test_tensors_of_a_layer_are_those_of_transformers(family, linear, tmp_path):
    stacks = FAMILIES[family].stacked_experts
    sizes = {"hidden": 24, "ffn": 40, "head": 8, "query": 32, "key": 16, "heads": 4}
    sizes |= {"experts": 3, "expert_ffn": 40 if stacks else 12, "shared_ffn": 7}
    sizes |= {"linear_key": 8, "linear_value": 30, "linear_heads": 6, "linear_head": 5}
    sizes |= {"taps": 3, "one": 1}
    experts = 3 if FAMILIES[family].has_experts else 0
    described = {
        name: tuple(sizes[dimension] for dimension in dimensions)
        for name, dimensions in layer_tensors(FAMILIES[family], experts, linear=linear).items()
    }
    joined = {
        f"{s}.{kind}": [f"{m}.{kind}" for m in ms]
        for s, ms in FAMILIES[family].stored.items()
        for kind in ("weight", "bias")
        if f"{ms[0]}.{kind}" in described
    }
    if stacks:  # inputs before outputs, and gate and up projection in one tensor
        described = {n: s for n, s in described.items() if "mlp.experts." not in n}
        described |= {"mlp.experts.gate_up_proj": (3, 24, 80), "mlp.experts.down_proj": (3, 40, 24)}
        biases = {"gate_up_proj_bias": (3, 80), "down_proj_bias": (3, 24)}
        described |= {f"mlp.experts.{name}": shape for name, shape in biases.items()}
    parts = {name: [described.pop(part) for part in own] for name, own in joined.items()}
    described |= {name: (sum(p[0] for p in own), *own[0][1:]) for name, own in parts.items()}
    tiny_model(family).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # the first layer has linear attention where any has
    prefix = f"model.layers.{3 if family in LINEAR and not linear else 0}."
    assert described == {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_layer_belongs_to_one_megatron_parameter(family):
    described, experts = FAMILIES[family], 3 if FAMILIES[family].has_experts else 0
    for linear in (False, True) if family in LINEAR else (False,):
        entries = layer_parameters(described, experts, linear=linear)
        mapped = [name for entry in entries for name in entry.hf]
        assert sorted(mapped) == sorted(layer_tensors(described, experts, linear=linear))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_absent_keys_are_those_of_transformers(family):
    described = FAMILIES[family]
    config = getattr(transformers, described.config_class)()
    assert config.tie_word_embeddings == described.tied_by_default
    assert config.rms_norm_eps == described.norm_epsilon
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    assert rope["rope_theta"] == described.rotary_base
    assert rope.get("partial_rotary_factor") == described.rotary_factor
    assert config.rms_norm_eps == described.norm_epsilon
    heads = config.hidden_size // config.num_attention_heads
    assert getattr(config, "head_dim", None) in (None, described.head_size or heads)
    activation = {described.activation_key: described.activation}
    for key, value in {**described.fixed, **activation}.items():
        assert getattr(config, key) == value


def test_every_file_of_the_package_is_a_family():
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")}
    assert files == {*FAMILIES, "__init__", "base", "registry"}


def test_families_are_read_without_torch_megatron_or_transformers():
    code = (
        "import sys, dms_train.families\n"
        "heavy = {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
