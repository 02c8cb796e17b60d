"""Tiny GGUF files, written from Hugging Face weights as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes

TEXT = (
    "The 12 sheets cost 345 dollars; 7*8 = 56, isn't it?\n\n"
    "def add(a, b):\n    return a + b  # naïve café 東京 😀\n"
) * 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    **_NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_LAYERS = (
    *(LayerAttention(rotary_base=10000.0, window=16),) * 5,
    LayerAttention(rotary_base=100000.0),
)
Weights = dict[str, torch.Tensor]


def architecture(family: str = "llama", **changes: Any) -> Architecture:
    """Two layers, 4 query and 2 KV heads of 16; for Gemma 3 six layers and heads of 256."""
    values: dict[str, Any] = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rotary_base": 100000.0,
        "layernorm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    if family == "gemma3_text":
        values |= {"num_layers": 6, "kv_channels": 256, "layers": _GEMMA_LAYERS}
    return Architecture(**{**values, **changes})


def gguf_kind(family: str) -> str:
    """The name of the architecture in llama.cpp."""
    return {"gemma3_text": "gemma3"}.get(family, family)


def weights(a: Architecture) -> Weights:
    """Random weights by their names in Hugging Face; 1 + a norm is exact in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(a).items()
    drawn = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes}
    return {n: (w * 1024).round() / 1024 if "norm" in n else w for n, w in drawn.items()}


def gguf_name(name: str, family: str = "llama") -> str:
    """The name of a tensor in llama.cpp."""
    for ours, theirs in (_GEMMA_NAMES if family == "gemma3_text" else _NAMES).items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def tokenizer(digits: bool = True) -> Any:
    """A byte-level BPE tokenizer of 320 tokens, with special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def tokenizer_metadata(made: Any, pre: str = "smollm") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer."""
    import json

    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata(a: Architecture) -> dict[str, Any]:
    """All metadata of a file, with a tokenizer of 320 tokens."""
    own = {
        "block_count": a.num_layers,
        "context_length": a.max_position_embeddings,
        "embedding_length": a.hidden_size,
        "feed_forward_length": a.ffn_hidden_size,
        "attention.head_count": a.num_attention_heads,
        "attention.head_count_kv": a.num_query_groups,
        "attention.layer_norm_rms_epsilon": a.layernorm_epsilon,
        "rope.freq_base": a.rotary_base,
        "rope.dimension_count": a.kv_channels,
    }
    if a.family == "gemma3_text":
        del own["rope.dimension_count"]
        sizes = {"key_length": a.kv_channels, "value_length": a.kv_channels, "sliding_window": 16}
        own |= {f"attention.{key}": size for key, size in sizes.items()}
    return {
        "general.license": "apache-2.0",
        **{f"{gguf_kind(a.family)}.{key}": value for key, value in own.items()},
        **tokenizer_metadata(tokenizer()),
    }


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in llama.cpp's order: channel i, then channel i + d/2, for each i."""
    size = len(rows) // heads
    order = [h * size + i + half * size // 2 for h in range(heads) for i in range(size // 2)
             for half in (0, 1)]  # fmt: skip
    return rows[order]


def tensors(a: Architecture, values: Weights) -> dict[str, np.ndarray]:
    """Tensors of a file in float32."""
    heads = {"attn_q": a.num_attention_heads, "attn_k": a.num_query_groups}
    stored = {}
    for name, tensor in values.items():
        theirs, rows = gguf_name(name, a.family), tensor.numpy()
        if a.family == "gemma3_text" and "norm" in name:
            rows = rows + 1
        kind = theirs.split(".")[-2]
        if a.family == "llama" and kind in heads:
            rows = permuted(rows, heads[kind])
        stored[theirs] = rows
    return stored


def write(
    path: Path,
    a: Architecture,
    stored: Mapping[str, np.ndarray | tuple[np.ndarray, Any]],
    **changes: Any,
) -> Path:
    """Write a file; a change of None removes a key of the metadata, `__` in a key means `.`.

    A tensor may be a pair: bytes of quantised rows, and their type.
    """
    import gguf

    facts = {**metadata(a), **{key.replace("__", "."): v for key, v in changes.items()}}
    writer = gguf.GGUFWriter(path, str(facts.pop("general.architecture", gguf_kind(a.family))))
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    for key, value in facts.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, tensor in stored.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_file(path: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a whole float32 model of a family."""
    a = architecture(family)
    return write(path, a, tensors(a, weights(a)), **changes)
