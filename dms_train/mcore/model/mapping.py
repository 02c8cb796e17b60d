"""Mapping between Megatron parameters and Hugging Face tensors of a whole model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dms_train.families import ParameterMap
from dms_train.families.decoder.parameters import layer_parameters
from dms_train.hf.architecture import Architecture
from dms_train.method.layer import MethodLayer


def entries(architecture: Architecture) -> Iterator[ParameterMap]:
    """Yield all parameters with global layer numbers, in the order of the forward pass."""
    yield ParameterMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    family, experts = architecture.described, architecture.num_experts
    for layer, attention in enumerate(architecture.attention_layers):
        for entry in layer_parameters(family, experts, linear=attention.linear):
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


def _qkv_rows(architecture: Architecture) -> tuple[int, ...]:
    """Count the rows of one KV group in the q, k, v matrix: queries, gate if any, keys, values."""
    query, key = _group_rows(architecture)
    gate = (query,) if architecture.described.output_gate else ()
    return (query, *gate, key, key)


def to_megatron(entry: ParameterMap, tensors: list[Tensor], architecture: Architecture) -> Tensor:
    """Make the Megatron tensor from Hugging Face tensors: all full, or all one rank's part."""
    if entry.layout == "plain":
        return tensors[0]
    if entry.layout == "gated":
        return torch.cat(tensors)
    if entry.layout == "taps":
        tensors = [t.squeeze(1) for t in tensors]
    # KV groups or key heads in these tensors; keys are the last but one, or the second
    keys, rows = tensors[-1], architecture.kv_channels
    if entry.layout != "qkv":
        assert architecture.linear is not None
        keys, rows = tensors[1], architecture.linear.key_channels
    groups = keys.shape[0] // rows
    grouped = [t.unflatten(0, (groups, -1)) for t in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def to_hf(entry: ParameterMap, tensor: Tensor, architecture: Architecture) -> dict[str, Tensor]:
    """Invert `to_megatron`: return Hugging Face names and full tensors."""
    if entry.layout == "plain":
        tensors: list[Tensor] = [tensor]
    elif entry.layout == "gated":
        tensors = list(tensor.chunk(2))
    else:
        groups, rows = architecture.num_query_groups, _qkv_rows(architecture)
        if entry.layout != "qkv":
            assert architecture.linear is not None
            groups, rows = architecture.linear.key_heads, architecture.linear.group_rows
        grouped = tensor.unflatten(0, (groups, -1))
        own = grouped.split(rows[: len(entry.hf)], dim=1)
        tensors = [t.flatten(0, 1) for t in own]
    if entry.layout == "taps":
        tensors = [t.unsqueeze(1) for t in tensors]
    return {name: hf_tensor.contiguous() for name, hf_tensor in zip(entry.hf, tensors, strict=True)}


def eviction_channel_rows(
    architecture: Architecture, method: MethodLayer, groups: int
) -> list[int]:
    """Return the rows of the eviction channels of `groups` KV groups in a local q, k, v matrix."""
    query, key = _group_rows(architecture)
    rows, size = method.channel_rows(query, key), sum(_qkv_rows(architecture))
    return [group * size + row for group in range(groups) for row in rows]
