"""Mapping between Megatron parameters and Hugging Face tensors of a whole model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dms_train.families import FAMILIES, ParameterMap
from dms_train.hf.architecture import Architecture
from dms_train.method.layer import MethodLayer


def entries(architecture: Architecture) -> Iterator[ParameterMap]:
    """Yield all parameters with global layer numbers, in the order of the forward pass."""
    yield ParameterMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    parameters = FAMILIES[architecture.family].layer_parameters(architecture.num_experts)
    for layer in range(architecture.num_layers):
        for entry in parameters:
            yield ParameterMap(
                f"decoder.layers.{layer}.{entry.megatron}",
                tuple(f"model.layers.{layer}.{name}" for name in entry.hf),
                entry.layout,
            )
    yield ParameterMap("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not architecture.tie_word_embeddings:
        yield ParameterMap("output_layer.weight", ("lm_head.weight",))


def _group_rows(architecture: Architecture) -> tuple[int, int]:
    """Count the query rows and the key (or value) rows of one KV group."""
    heads_per_group = architecture.num_attention_heads // architecture.num_query_groups
    return heads_per_group * architecture.kv_channels, architecture.kv_channels


def to_megatron(entry: ParameterMap, tensors: list[Tensor], architecture: Architecture) -> Tensor:
    """Make the Megatron tensor from Hugging Face tensors: all full, or all one rank's part."""
    if entry.layout == "plain":
        return tensors[0]
    if entry.layout == "gated":
        return torch.cat(tensors)
    groups = tensors[1].shape[0] // architecture.kv_channels  # KV groups in these tensors
    grouped = [t.unflatten(0, (groups, -1)) for t in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def to_hf(entry: ParameterMap, tensor: Tensor, architecture: Architecture) -> dict[str, Tensor]:
    """Invert `to_megatron`: return Hugging Face names and full tensors."""
    if entry.layout == "plain":
        tensors: list[Tensor] = [tensor]
    elif entry.layout == "gated":
        tensors = list(tensor.chunk(2))
    else:
        query, key = _group_rows(architecture)
        grouped = tensor.unflatten(0, (architecture.num_query_groups, -1))
        tensors = [t.flatten(0, 1) for t in grouped.split([query, key, key], dim=1)]
    return {name: hf_tensor.contiguous() for name, hf_tensor in zip(entry.hf, tensors, strict=True)}


def eviction_channel_rows(
    architecture: Architecture, method: MethodLayer, groups: int
) -> list[int]:
    """Return the rows of the eviction channels of `groups` KV groups in a local q, k, v matrix."""
    query, key = _group_rows(architecture)
    rows = method.channel_rows(query, key)
    return [group * (query + 2 * key) + row for group in range(groups) for row in rows]
