"""The pass that makes the stored distributions of a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.schedule.step import run_schedule
from dms_train.method.top_logits import TopLogits


def top_logits(
    models: list[Any],
    chunks: list[Any],
    batches: list[Batch],
    config: Any,
    view: ParallelView,
    stores: tuple[int, float],
) -> list[TopLogits]:
    """Run micro-batches under the present plan and return their most probable tokens.

    Args:
        models: Chunks of the model.
        chunks: The same, as the schedule takes them.
        batches: This rank's micro-batches, on the device.
        config: Configuration of megatron-core.
        view: This rank's position in the layout.
        stores: Number of tokens of a position, and the temperature.

    Returns:
        For every micro-batch, on the CPU, [b, s, k] and [b, s]; on one rank of every data-parallel
        copy, an empty list on the others.
    """
    outputs: list[TopLogits] = []
    for model in models:
        model.stores = stores
    try:
        with torch.no_grad():
            forward = _forward_step(view, outputs)
            run_schedule(chunks, batches, forward, config, has_teacher=False, forward_only=True)
    finally:
        for model in models:
            model.stores = None
    return outputs


def _forward_step(view: ParallelView, outputs: list[TopLogits]) -> Any:
    keeps = view.reports and view.cp_rank == 0

    def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        own = (view.own_positions(x) for x in (batch.tokens, batch.labels))
        output = model(*own, batch.samples, batch.documents)

        def keep(result: tuple[TopLogits, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            if keeps:
                outputs.append(result[0].map(lambda x: x.transpose(0, 1).cpu()))
            return result[1].sum(), {}

        return output, keep

    return forward_step
