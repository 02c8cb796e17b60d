"""The language model of a checkpoint with a vision tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dms_train.hf.directory import read_architecture
from dms_train.hf.errors import HFError
from dms_train.hf.safetensors_files import SINGLE_FILE
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.llm import LLM

TEXT = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "initializer_range": 0.1,  # with 0.2 rounding in float32 grows to 3e-4
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A random Qwen3.5 with a vision tower and a layer that predicts further tokens."""
    path = tmp_path_factory.mktemp("model") / "whole"
    torch.manual_seed(4)
    vision = {**VISION, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    model.save_pretrained(path)
    tensors = load_file(path / SINGLE_FILE)
    assert any(name.startswith("model.visual.") for name in tensors)
    assert "model.language_model.layers.0.linear_attn.A_log" in tensors
    save_file({**tensors, "mtp.fc.weight": torch.ones(2, 2)}, path / SINGLE_FILE)
    return path, model


def test_only_the_language_model_is_read_and_one_line_says_so(
    checkpoint: tuple[Path, torch.nn.Module],
) -> None:
    path, _ = checkpoint
    architecture, reader = read_architecture(path), WeightReader(path)
    assert architecture.family == "qwen3_5_text"
    assert [layer.linear for layer in architecture.attention_layers] == [True] * 3 + [False]
    warning = reader.require(architecture)
    assert warning is not None
    assert "\n" not in warning
    assert "only the language model is read" in warning
    assert not [name for name in reader.names() if "visual" in name or "mtp" in name]


def test_it_computes_what_the_whole_model_computes_for_text(
    checkpoint: tuple[Path, torch.nn.Module],
) -> None:
    path, model = checkpoint
    ids = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    found = LLM(path, dtype="float32").logits(ids.tolist())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_without_the_keys_of_its_language_model_is_refused(
    checkpoint: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": None}))
    with pytest.raises(HFError, match="text_config=None: state the keys of the language model"):
        read_architecture(tmp_path)
