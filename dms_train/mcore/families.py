"""One table per model family: Megatron parameter <-> Hugging Face tensors, read both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture

Layout = Literal["plain", "qkv", "gated"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Layouts: `plain` is the same tensor; `qkv` interleaves q, k and v rows per KV group; `gated`
    stacks gate over up.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "plain"


_ATTENTION, _MLP = "self_attention.", "mlp."
_LAYER = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",)),
    Entry(
        _ATTENTION + "linear_qkv.weight",
        tuple(f"self_attn.{c}_proj.weight" for c in "qkv"),
        "qkv",
    ),
    Entry(_ATTENTION + "linear_proj.weight", ("self_attn.o_proj.weight",)),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    Entry(_MLP + "linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    Entry(_MLP + "linear_fc2.weight", ("mlp.down_proj.weight",)),
)
_QWEN2_BIAS = (
    Entry(_ATTENTION + "linear_qkv.bias", tuple(f"self_attn.{c}_proj.bias" for c in "qkv"), "qkv"),
)
_QWEN3_NORMS = tuple(
    Entry(f"{_ATTENTION}{c}_layernorm.weight", (f"self_attn.{c}_norm.weight",)) for c in "qk"
)
LAYER_TABLES: dict[str, tuple[Entry, ...]] = {
    "llama": _LAYER,
    "qwen2": _LAYER + _QWEN2_BIAS,
    "qwen3": _LAYER + _QWEN3_NORMS,
}


def entries(architecture: Architecture) -> Iterator[Entry]:
    """All parameters with global layer numbers, in the order of the forward pass."""
    yield Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(architecture.num_layers):
        for entry in LAYER_TABLES[architecture.family]:
            yield Entry(
                f"decoder.layers.{layer}.{entry.megatron}",
                tuple(f"model.layers.{layer}.{name}" for name in entry.hf),
                entry.layout,
            )
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not architecture.tie_word_embeddings:
        yield Entry("output_layer.weight", ("lm_head.weight",))


def _group_rows(architecture: Architecture) -> tuple[int, int]:
    """Query rows and key (or value) rows of one KV group."""
    heads_per_group = architecture.num_attention_heads // architecture.num_query_groups
    return heads_per_group * architecture.kv_channels, architecture.kv_channels


def to_megatron(entry: Entry, tensors: list[Tensor], architecture: Architecture) -> Tensor:
    """The full Megatron tensor from full Hugging Face tensors."""
    if entry.layout == "plain":
        return tensors[0]
    if entry.layout == "gated":
        return torch.cat(tensors)
    grouped = [t.unflatten(0, (architecture.num_query_groups, -1)) for t in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def to_hf(entry: Entry, tensor: Tensor, architecture: Architecture) -> dict[str, Tensor]:
    """Inverse of `to_megatron`: Hugging Face names and full tensors."""
    if entry.layout == "plain":
        parts: list[Tensor] = [tensor]
    elif entry.layout == "gated":
        parts = list(tensor.chunk(2))
    else:
        query, key = _group_rows(architecture)
        grouped = tensor.unflatten(0, (architecture.num_query_groups, -1))
        parts = [t.flatten(0, 1) for t in grouped.split([query, key, key], dim=1)]
    return {name: part.contiguous() for name, part in zip(entry.hf, parts, strict=True)}


def lane_rows(architecture: Architecture, channel: int, groups: int) -> list[int]:
    """Rows of `groups` KV groups' borrowed neurons in a fused (local) q, k, v projection."""
    query, key = _group_rows(architecture)
    first = channel % architecture.kv_channels
    return [group * (query + 2 * key) + first for group in range(groups)]
