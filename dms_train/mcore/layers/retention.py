"""Counts of the tokens that KV heads keep, made by the attention during an evaluation."""

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
    """Let every layer add up the slots that its KV heads hold at the last token."""
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
    """Compute the share of tokens that each KV head holds at the end of a sample, on every rank.

    Every rank calls it within `counted`, after the pass.

    Args:
        models: This rank's chunks of the student.
        view: Sizes, ranks and groups of this process.
        shape: Layers and KV heads of the whole model.
        tokens: Number of tokens of all samples of the pass, on all ranks together.

    Returns:
        [layers][KV heads].
    """
    total = torch.zeros(shape, dtype=torch.float64, device=view.device)
    for attention in _attentions(models):
        heads = attention.held.numel()
        first = (view.tp_rank * view.cp_size + view.cp_rank) * heads
        total[attention.layer_number - 1, first : first + heads] = attention.held.double()
    # every KV head belongs to one rank of each data-parallel copy
    dist.all_reduce(total)
    return tuple(tuple(row) for row in (total / tokens).tolist())
