"""Weights that would be read as something else are refused by everything that reads a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.app import conversion, inspection, start_point
from dms_train.app.model import read_architecture as planned_architecture
from dms_train.export.kv_pooling import pool_kv_heads
from dms_train.hf.directory import read_architecture
from dms_train.hf.json_files import read_json
from dms_train.hf.options import ModelOptions
from dms_train.hf.safetensors_files import SINGLE_FILE
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.llm import LLM
from dms_train.method.spec import PRESETS
from tests.support import configs

Weights = dict[str, Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
READERS: dict[str, Callable[[Path], Any]] = {
    "engine": lambda folder: LLM(folder, dtype="float32"),
    "inspect": inspection.describe,
    "import": lambda folder: conversion.import_model(
        str(folder), folder.parent / "imported", dtype="fp32", revision=None, download=False
    ),
    "gqa": lambda folder: pool_kv_heads(str(folder), folder.parent / "pooled", 1),
    "train": lambda folder: start_point.find_start(configs.config(model__path=str(folder))),
}
READS_CONFIG_ONLY = {
    "plan": lambda folder: planned_architecture(ModelOptions(path=str(folder))),
}
ids = torch.randint(0, 61, (20,), generator=torch.Generator().manual_seed(3))


def edit(folder: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder / SINGLE_FILE)
    change(weights)
    save_file(weights, folder / SINGLE_FILE, {"format": "pt"})


def state(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**read_json(file), **keys}))


def quantize(dtype: torch.dtype, scaled: bool) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if "proj" in name]:
            scale = weights[name].abs().max() / 100
            weights[name] = (weights[name] / scale).to(dtype)
            if scaled:
                weights[f"{name}_scale"] = scale.reshape(())

    return change


def without_traces(folder: Path) -> None:
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantised_weights_are_refused_whatever_config_json_says(export, reader, dtype):
    folder = export("llama", None)
    edit(folder, quantize(dtype, scaled=reader != "gqa"))
    with pytest.raises(ValueError, match=r"tensors are stored as .*proj.*quantised") as error:
        READERS[reader](folder)
    assert "\n" not in str(error.value)
    without_traces(folder)


@pytest.mark.parametrize("reader", {**READERS, **READS_CONFIG_ONLY})
@pytest.mark.parametrize(
    "name",
    [
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
        "quanto_qmap.json",
        "quant_model_description_w8a8.json",
        "compression_config.json",
        "adapter_config.json",
    ],
)
def test_side_files_that_change_the_weights_meaning_are_refused(export, reader, name):
    folder = export("llama", None)
    (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=name) as error:
        {**READERS, **READS_CONFIG_ONLY}[reader](folder)
    assert "\n" not in str(error.value)
    without_traces(folder)


def add(name: str, shape: tuple[int, ...]) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: torch.ones(shape)})


def one_more_layer(weights: Weights) -> None:
    for name in [name for name in weights if "layers.1." in name]:
        weights[name.replace("layers.1.", "layers.2.")] = weights[name].clone()


UNREAD = {
    "a bias": (add("model.layers.1.self_attn.o_proj.bias", (32,)), "1 tensors .*o_proj.bias"),
    "a norm": (add("model.layers.0.self_attn.q_norm.weight", (8,)), "1 tensors .*q_norm.weight"),
    "a layer": (one_more_layer, "9 tensors .*layers.2"),
    "an adapter": (
        add("model.layers.0.self_attn.dms_proj_alpha.weight", (2, 32)),
        "dms_proj_alpha",
    ),
    "a scale": (add("model.layers.0.self_attn.k_proj.k_scale", ()), "k_scale"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", UNREAD)
def test_tensors_that_would_be_ignored_are_refused(export, reader, case):
    change, named = UNREAD[case]
    folder = export("llama", None)
    edit(folder, change)
    with pytest.raises(ValueError, match=named) as error:
        READERS[reader](folder)
    assert "\n" not in str(error.value)
    without_traces(folder)


@pytest.mark.parametrize("reader", READERS)
def test_buffers_that_are_computed_anew_are_named_in_one_warning(export, reader, caplog):
    folder = export("qwen2", None)
    for layer in (0, 1):
        edit(folder, add(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq", (4,)))
    with caplog.at_level(logging.WARNING, logger="dms_train"):
        found = READERS[reader](folder)
    lines = [r.getMessage() for r in caplog.records if r.name == "dms_train"]
    lines += [found["warning"]] if reader == "inspect" else []
    (line,) = [line for line in lines if "tensors" in line]
    assert "2 tensors are ignored" in line
    assert "layers.0.self_attn.rotary_emb.inv_freq" in line


@pytest.mark.parametrize("preset", ["dms", "dmc", "dms_nvidia", "dms_fastdms"])
def test_every_export_format_has_the_expected_tensors_only(export, preset):
    dtype = torch.float32 if preset in ("dms", "dmc") else torch.bfloat16
    folder = export("qwen3", PRESETS[preset], dtype=dtype, block_size=2)
    assert WeightReader(folder).require(read_architecture(folder)) is None


def untie(folder: Path, head: Callable[[Tensor], Tensor]) -> None:
    edit(folder, lambda weights: weights.update({HEAD: head(weights[EMBEDDING])}))


def transformers_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(ids[None]).logits[0]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("head", [lambda w: w + 1e-3 * (w == w.max()), lambda w: w[:-1].clone()])
def test_a_tied_model_with_an_output_layer_of_its_own_is_refused(export, reader, head):
    folder = export("qwen3", None)  # tied
    untie(folder, head)
    with pytest.raises(ValueError, match=rf"{HEAD} differs .*tie_word_embeddings=true"):
        READERS[reader](folder)
    without_traces(folder)


def test_what_the_refusal_advises_gives_the_logits_of_transformers(export, random_weights):
    folder = export("qwen3", None)
    untie(folder, lambda w: 0.5 * w.flip(0))
    state(folder, tie_word_embeddings=False)
    own = LLM(folder, dtype="float32").logits(ids.tolist())
    assert (own - transformers_logits(folder)).abs().max() < 1e-3
    tied = own.abs().max()
    edit(folder, lambda weights: weights.pop(HEAD))
    state(folder, tie_word_embeddings=True)
    other = LLM(folder, dtype="float32").logits(ids.tolist())
    assert (other - transformers_logits(folder)).abs().max() < 1e-3
    assert (other - own).abs().max() > 0.1 * tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_embedding_in_its_dtype_is_accepted(export, dtype):
    folder = export("qwen3", None, dtype=dtype)
    untie(folder, torch.clone)
    for read in READERS.values():
        read(folder)


BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize("reader", ["engine", "import", "gqa"])
@pytest.mark.parametrize("bad", BAD)
def test_weights_that_are_not_finite_are_refused_by_name(export, reader, bad):
    folder = export("qwen2", None)
    name = "model.layers.1.self_attn.k_proj.bias"
    edit(folder, lambda weights: weights[name][-1:].fill_(BAD[bad]))
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite") as error:
        READERS[reader](folder)
    assert "\n" not in str(error.value)
    without_traces(folder)


def test_numbers_beyond_the_compute_dtype_are_refused(export):
    folder = export("llama", None)
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda weights: weights[name][3, 4].fill_(1e5))
    with pytest.raises(ValueError, match=rf"{name} has numbers beyond float16"):
        LLM(folder, dtype="float16")
    LLM(folder, dtype="bfloat16")


def test_an_export_of_weights_that_are_not_finite_is_not_written(export, random_weights):
    def last_is_nan():
        architecture = read_architecture(export("llama", None))
        for name, tensor in random_weights(architecture).items():
            yield name, tensor * torch.nan if name == HEAD else tensor

    folder = export("llama", None)
    before = (folder / SINGLE_FILE).read_bytes()
    with pytest.raises(ValueError, match=rf"{HEAD}: holds NaN"):
        export("llama", None, weights=last_is_nan())
    assert (folder / SINGLE_FILE).read_bytes() == before
