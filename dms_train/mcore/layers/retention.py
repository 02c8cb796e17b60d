"""Which KV heads keep how much, counted by the attention layers during an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dms_train.mcore.groups import ParallelView


def _attentions(models: list[Any]) -> list[Any]:
    return [layer.self_attention for model in models for layer in model.decoder.layers]


@contextmanager
def counted(models: list[Any]) -> Iterator[None]:
    """While open, every layer adds up the slots its KV heads hold at the last token."""
    for attention in _attentions(models):
        attention.held = torch.zeros((), dtype=torch.int64)
    try:
        yield
    finally:
        for attention in _attentions(models):
            attention.held = None


def kept(
    models: list[Any], view: ParallelView, shape: tuple[int, int], tokens: float
) -> tuple[tuple[float, ...], ...]:
    """Share of the tokens that each KV head still holds at the end of a sample, on every rank.

    To be called within `counted`, after the pass; every rank calls it.

    Args:
        models: This rank's chunks of the student.
        view: This process among the others.
        shape: Layers and KV heads of the whole model.
        tokens: Of all samples of the pass, all ranks together.

    Returns:
        [layers][KV heads].
    """
    total = torch.zeros(shape, dtype=torch.float64, device=view.device)
    for attention in _attentions(models):
        heads = attention.held.numel()
        first = view.tp_rank * heads
        total[attention.layer_number - 1, first : first + heads] = attention.held.double()
    # every KV head belongs to one rank of each data-parallel copy
    dist.all_reduce(total)
    return tuple(tuple(row) for row in (total / tokens).tolist())
