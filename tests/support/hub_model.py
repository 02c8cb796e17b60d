"""A tiny model with the files and the configuration keys of Qwen/Qwen3-0.6B on the hub."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dms_train.hf.config_json import from_hf_config
from dms_train.hf.tensors import expected_shapes

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = (
    "the",
    "river",
    "stone",
    "house",
    "under",
    "seven",
    "old",
    "green",
    "bird",
    "walked",
    "and",
)
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 512,  # larger than the tokenizer's, as on the hub
}


def texts(count: int, seed: int) -> list[str]:
    """Sentences of random words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=rng.randint(40, 120))) + "." for _ in range(count)]


def write_model(folder: Path) -> None:
    """The model directory, as `hf download` leaves it."""
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", _CONFIG)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "do_sample": True, "eos_token_id": [2, 0], "pad_token_id": 0}
        | {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"},
    )
    _write_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape).bfloat16()
        if "norm" in name
        else (0.1 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in expected_shapes(from_hf_config(_CONFIG)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_text(file: Path, documents: int = 200) -> None:
    """Compressed JSON lines with the fields of allenai/c4."""
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for text in texts(documents, seed=1):
            row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
            lines.write(json.dumps(row) + "\n")


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(50, seed=2), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "added_tokens_decoder": {
                str(number): {"content": token, "special": True}
                for number, token in enumerate(_SPECIAL)
            },
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "model_max_length": 512,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
