"""Models of public shapes with random weights, whose decisions evict a given share of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dms_train.hf.architecture import Architecture
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.models.loader import LoadedModel
from dms_train.method.base import MethodSpec
from dms_train.method.decisions import eviction_channel
from dms_train.method.spec import PRESETS

# Measured code and page of the records, for the command `stale`.
ENGINE = ("dms_train/inference", "dms_train/kernels/decode", "dms_train/kernels/prefill")
SERVING_PAGE = "docs/performance/serving.md"
WINDOW = 256
KEPT = 0.125  # share of the tokens beyond the window that is kept
LONGEST = 33000  # largest number of tokens of a sequence
MEMORY = 0.9  # share of the GPU for each engine, vLLM's default
_SAMPLE = 512  # number of tokens that calibrate the share of evictions
_SPREAD = 0.02  # standard deviation of the weights

_COMMON: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "max_position_embeddings": 40960,
    "rotary_base": 500000.0,
    "layernorm_epsilon": 1e-5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "num_layers": 16,
        "ffn_hidden_size": 8192,
        "kv_channels": 64,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "num_layers": 32,
        "ffn_hidden_size": 14336,
        "kv_channels": 128,
        "tie_word_embeddings": False,
    },
    "SmolLM2-135M": {
        "hidden_size": 576,
        "num_layers": 30,
        "ffn_hidden_size": 1536,
        "kv_channels": 64,
        "tie_word_embeddings": True,
        "num_attention_heads": 9,
        "num_query_groups": 3,
        "vocab_size": 49152,
    },
    "lab": {
        "hidden_size": 384,
        "num_layers": 8,
        "ffn_hidden_size": 1024,
        "kv_channels": 64,
        "tie_word_embeddings": False,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "vocab_size": 128,
    },
    "small": {
        "hidden_size": 128,
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "kv_channels": 32,
        "tie_word_embeddings": True,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 512,
    },
}


def architecture(shape: str) -> Architecture:
    """Return the sizes of one of `SHAPES`."""
    return Architecture(**{**_COMMON, **SHAPES[shape]})


def random_model(shape: str, kept: float, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Draw a model that keeps about this share of the tokens beyond the window, with DMS.

    Args:
        shape: One of `SHAPES`.
        kept: Share of decisions that keep a token.
        device: Device of the weights.
        dtype: Dtype of the weights.
    """
    sizes, spec = architecture(shape), PRESETS["dms"].override(window=WINDOW)
    torch.manual_seed(0)
    with torch.device(device):
        decoder = Decoder(sizes, spec).to(dtype).eval()
    decoder.requires_grad_(False)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, _SPREAD)
    spec = spec.override(alpha_offset=_offset(decoder, spec, kept))
    for layer in decoder.decoder_layers:
        layer.self_attn.spec = spec
    return LoadedModel(decoder=decoder, architecture=sizes, spec=spec, dtype=dtype, config={})


def with_model(
    shape: str, policies: Iterable[str], device: torch.device
) -> Iterator[tuple[LoadedModel, str]]:
    """Yield every policy with one random model, in bf16 on a GPU and in fp32 elsewhere."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(shape, KEPT, device, dtype)
    for policy in policies:
        yield model, policy


@torch.no_grad()
def _offset(decoder: Decoder, spec: MethodSpec, kept: float) -> float:
    """Return the offset of the decision logit with which the first layer keeps this share."""
    layer, a = decoder.decoder_layers[0], decoder.architecture
    device = decoder.embed_tokens.weight.device
    tokens = torch.randint(0, a.vocab_size, (_SAMPLE,), device=device)
    product = layer.self_attn.qkv_proj(layer.input_layernorm(decoder.embed_tokens(tokens)))
    query = product[:, : a.num_attention_heads * a.kv_channels]
    heads = query.view(1, _SAMPLE, a.num_query_groups, -1, a.kv_channels)
    activation = eviction_channel(heads, spec.channel).float() * spec.alpha_scale
    return float(torch.quantile(activation.flatten(), kept))
