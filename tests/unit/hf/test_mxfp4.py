"""MXFP4 experts are read as what the OCP Microscaling format defines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.hf.directory import read_architecture
from dms_train.hf.errors import HFError
from dms_train.hf.mxfp4 import dequantise
from dms_train.hf.safetensors_files import SINGLE_FILE
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_reader import WeightReader
from tests.unit.hf import conftest as hf

EXPERTS, HIDDEN, WIDTH = 4, 32, 96
BYTES = torch.Generator().manual_seed(0)


def number(code: int) -> float:
    """Value of four bits: a sign, two exponent bits with bias 1, and a mantissa bit."""
    sign, exponent, mantissa = -1 if code >> 3 else 1, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * 2.0 ** (exponent - 1) * (1 + mantissa / 2)


def plain(blocks: Tensor, scales: Tensor) -> Tensor:
    """One row, number by number."""
    values = []
    for block, scale in zip(blocks.tolist(), scales.tolist(), strict=True):
        for byte in block:
            values += [number(code) * 2.0 ** (scale - 127) for code in (byte & 15, byte >> 4)]
    return torch.tensor(values, dtype=torch.float64)


def random_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (*shape, 16), generator=BYTES, dtype=torch.uint8)
    return blocks, torch.randint(110, 135, shape, generator=BYTES, dtype=torch.uint8)


def test_every_number_and_scale_is_exact() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for scale in (0, 1, 100, 127, 200, 250):
        scales = torch.full((16,), scale, dtype=torch.uint8)
        assert torch.equal(dequantise(blocks, scales).double(), plain(blocks, scales))
    nothing = torch.full((16,), 255, dtype=torch.uint8)
    assert dequantise(blocks, nothing).isnan().all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published gpt-oss in small: experts in MXFP4, everything else in bfloat16."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=HIDDEN, intermediate_size=WIDTH, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=61, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=7,
    )  # fmt: skip
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load_file(tmp_path / SINGLE_FILE)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for name, rows, inputs in (
            ("gate_up_proj", 2 * WIDTH, HIDDEN),
            ("down_proj", HIDDEN, WIDTH),
        ):
            del weights[f"{at}.{name}"]
            blocks, scales = random_blocks(EXPERTS, rows, inputs // 32)
            weights |= {f"{at}.{name}_blocks": blocks, f"{at}.{name}_scales": scales}
    save_file(weights, tmp_path / SINGLE_FILE, {"format": "pt"})
    file = tmp_path / "config.json"
    stated = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(stated))
    return tmp_path


def test_experts_are_read_from_their_blocks(folder: Path) -> None:
    files, reader = load_file(folder / SINGLE_FILE), WeightReader(folder)
    architecture = read_architecture(folder)
    assert reader.require(architecture) is None
    assert sorted(expected_shapes(architecture)) == reader.names()
    assert reader.training_dtype() == "bf16"
    rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}
    for expert in range(EXPERTS):
        for projection, own in rows.items():
            stored = "down_proj" if projection == "down_proj" else "gate_up_proj"
            at = f"model.layers.1.mlp.experts.{stored}"
            pairs = (files[f"{at}_{kind}"][expert][own] for kind in ("blocks", "scales"))
            expected = torch.stack([plain(*pair) for pair in zip(*pairs, strict=True)])
            name = f"model.layers.1.mlp.experts.{expert}.{projection}.weight"
            assert torch.equal(reader.get(name).double(), expected)
            for start, stop in ((3, 20), (30, min(65, expected.shape[1]))):  # parts of blocks
                cut = expected[:, start:stop]
                assert torch.equal(reader.part(name, 1, start, stop).double(), cut)
            assert torch.equal(reader.part(name, 0, 5, 9).double(), expected[5:9])
            bias = files[f"{at}_bias"][expert][own]
            assert torch.equal(reader.get(name.replace("weight", "bias")), bias)
            assert torch.equal(reader.part(name.replace("weight", "bias"), 0, 5, 9), bias[5:9])


def test_a_model_of_such_experts_computes_what_transformers_does(folder: Path, tmp_path) -> None:
    """The same weights in bfloat16, stacked as transformers stacks them."""
    from transformers import AutoModelForCausalLM

    from dms_train.export.writer import write_export

    a, reader = read_architecture(folder), WeightReader(folder)
    weights = {name: reader.get(name) for name in expected_shapes(a)}
    out = tmp_path / "export"
    write_export(
        out, architecture=a, spec=hf.small_spec("dms"), cr_factor=None, target_cr=4.0,
        dtype=torch.bfloat16, export_format="dms", weights=weights.items(), source_dir=folder,
        selftest=None, provenance={},
    )  # fmt: skip
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.bfloat16)
    own = model.model.layers[0].mlp.experts
    gate = weights["model.layers.0.mlp.experts.2.gate_proj.weight"]
    assert torch.equal(own.gate_up_proj[2, :, ::2].T, gate)
    again = WeightReader(out)
    assert all(torch.equal(again.get(name), tensor) for name, tensor in weights.items())


def test_a_scale_that_is_not_a_number_is_refused(folder: Path) -> None:
    weights, at = load_file(folder / SINGLE_FILE), "model.layers.0.mlp.experts.down_proj"
    weights[f"{at}_scales"][3, 5] = 255
    save_file(weights, folder / SINGLE_FILE, {"format": "pt"})
    reader = WeightReader(folder)
    reader.get("model.layers.0.mlp.experts.2.down_proj.weight")
    with pytest.raises(HFError, match=rf"{at} holds NaN") as error:
        reader.get("model.layers.0.mlp.experts.3.down_proj.weight")
    assert "\n" not in str(error.value)


def test_blocks_of_another_shape_are_refused(folder: Path) -> None:
    weights, name = load_file(folder / SINGLE_FILE), "model.layers.0.mlp.experts.down_proj_scales"
    weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, folder / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(HFError, match=rf"{name} has shape"):
        WeightReader(folder)
