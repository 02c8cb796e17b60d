"""Eviction channels in the projections of this rank's model chunks: their rows, and zeroing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from dms_train.hf.architecture import Architecture
from dms_train.mcore import compat
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters
from dms_train.mcore.model import mapping
from dms_train.method.base import MethodSpec
from dms_train.method.layer import method_layer

# A parameter of this rank, and the rows of it that produce the channel.
ChannelRows = tuple[Any, list[int]]


def adapt(models: list[Any], spec: MethodSpec) -> None:
    """Let adapters replace the frozen rows of the channel, with equal values at first."""
    layer = method_layer(spec)
    for projection in adapters.channel_adapters(models):
        projection.set_rows(projection.channel_rows(layer))
        projection.read_channel()


def adapter_rows(models: list[Any]) -> Iterator[ChannelRows]:
    """Yield the rows of adapters that produce the channel: all of their own."""
    for projection in adapters.channel_adapters(models):
        for parameter in projection.channel_parameters():
            yield parameter, list(range(len(parameter)))


def projection_rows(
    models: list[Any], architecture: Architecture, spec: MethodSpec, view: ParallelView
) -> Iterator[ChannelRows]:
    """Yield the rows of the q, k, v projections that produce the channel."""
    groups = architecture.num_query_groups // view.tp_size
    rows = mapping.eviction_channel_rows(architecture, method_layer(spec), groups)
    for parameter in _projections(models, architecture.method_layers):
        yield parameter, rows


def _projections(models: list[Any], layer_numbers: list[int]) -> Iterator[Any]:
    """Yield the weight and bias of the q, k, v projections of the layers with these numbers."""
    for model in models:
        for layer in model.decoder.layers:
            if layer.layer_number - 1 not in layer_numbers:
                continue
            projection = layer.self_attention.linear_qkv
            for parameter in (projection.weight, projection.bias):
                # Transformer Engine has an empty tensor where there is no bias
                if parameter is not None and parameter.numel():
                    yield parameter


def reset(channel_rows: Iterable[ChannelRows], optimizer: Any) -> None:
    """Zero the channel, and its optimizer state unless `optimizer` is None."""
    if optimizer is not None:
        compat.create_optimizer_state(optimizer)
    for parameter, rows in channel_rows:
        parameter.data[rows] = 0
        if optimizer is not None:
            compat.zero_optimizer_rows(optimizer, parameter, rows)


@contextlib.contextmanager
def zeroed(channel_rows: Iterable[ChannelRows]) -> Iterator[None]:
    """Zero the channel inside the block."""
    before = [(p, rows, p.data[rows].clone()) for p, rows in channel_rows]
    for parameter, rows, _ in before:
        parameter.data[rows] = 0
    try:
        yield
    finally:
        for parameter, rows, values in before:
            parameter.data[rows] = values
