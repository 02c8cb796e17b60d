"""An export of a public shape with random weights, whose tokenizer has a word for every token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.serve.models import KEPT, WINDOW, random_model
from benchmarks.serve.peer import write_config
from benchmarks.word_tokenizer import EOD, write_word_tokenizer
from dms_train.export.writer import write_export
from dms_train.inference.models.blocks import MLP
from dms_train.inference.models.decoder import Decoder

_SETTINGS_FILE = "random_weights.json"
_SETTINGS = {"kept": KEPT, "window": WINDOW}


class RandomFolders(NamedTuple):
    """Model directories of a shape.

    Attributes:
        dms: Export.
        dense: Dense model with the same weights and tokenizer, as links to those of the export.
    """

    dms: Path
    dense: Path


def random_folders(shape: str, root: Path, device: torch.device) -> RandomFolders:
    """Return the model directories of a shape; write them if they are missing.

    Args:
        shape: Model, one of `benchmarks.serve.models.SHAPES`.
        root: Folder of all shapes.
        device: Device on which weights are drawn.
    """
    home = root.absolute() / shape
    folders = RandomFolders(*(home / name for name in RandomFolders._fields))
    if not folders.dense.exists() or _settings_of(home) != _SETTINGS:  # `dense` is written last
        refuse_other_models(root, shape)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        (home / _SETTINGS_FILE).write_text(json.dumps(_SETTINGS))
        write_random_export(shape, folders.dms, device)
        unfinished = folders.dense.with_suffix(".part")
        unfinished.mkdir()
        write_config(shape, unfinished)
        for pattern in ("*.safetensors*", "*token*"):
            for file in folders.dms.glob(pattern):
                (unfinished / file.name).symlink_to(file)
        unfinished.rename(folders.dense)
    return folders


def refuse_other_models(root: Path, shape: str) -> None:
    """Refuse a folder of models in which this module did not write the shape; ValueError."""
    home = root.absolute() / shape
    if home.exists() and _settings_of(home) is None:
        raise ValueError(f"{home}: is not of this benchmark; choose another folder with --models")


def _settings_of(home: Path) -> dict[str, float] | None:
    file = home / _SETTINGS_FILE
    return json.loads(file.read_text()) if file.is_file() else None


def write_random_export(shape: str, directory: Path, device: torch.device) -> None:
    """Write a DMS export.

    Args:
        shape: Model, one of `benchmarks.serve.models.SHAPES`.
        directory: Folder of the export.
        device: Device on which weights are drawn.
    """
    model = random_model(shape, KEPT, device, torch.bfloat16)
    write_export(
        directory,
        architecture=model.architecture,
        spec=model.spec,
        cr_factor=None,
        target_cr=1 / KEPT,
        dtype=torch.bfloat16,
        export_format="dms",
        weights=_named(model.decoder),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    words = (EOD, *(f"w{number}" for number in range(1, model.architecture.vocab_size)))
    write_word_tokenizer(directory, words)


def _named(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with Llama's names."""
    a = decoder.architecture
    key_rows = a.num_query_groups * a.kv_channels
    yield "model.embed_tokens.weight", decoder.embed_tokens.weight
    for number, layer in enumerate(decoder.decoder_layers):
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, MLP)
        rows = (a.num_attention_heads * a.kv_channels, key_rows, key_rows)
        query, key, value = attention.qkv_proj.weight.split(rows)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        named = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": attention.o_proj.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": mlp.down_proj.weight,
            "input_layernorm": layer.input_layernorm.weight,
            "post_attention_layernorm": layer.post_attention_layernorm.weight,
        }
        for name, weight in named.items():
            yield f"model.layers.{number}.{name}.weight", weight
    yield "model.norm.weight", decoder.norm.weight
    if not a.tie_word_embeddings:
        yield "lm_head.weight", decoder.lm_head.weight
