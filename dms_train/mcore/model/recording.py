"""Self-test of an export: decisions and logits of one text, gathered from all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.schedule.step import run_schedule


class Recording(NamedTuple):
    """Tensors input_ids [T], decision_logits float32 [layers, KV heads, T], logits [T, vocab]."""

    input_ids: Tensor
    decision_logits: Tensor
    logits: Tensor


def _forward_step(view: ParallelView, outputs: list[Tensor]) -> Any:
    def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        own = (view.own_positions(x) for x in (batch.tokens, batch.labels))
        arguments = (*own, batch.samples)
        output = model(*(t.to(view.device) for t in arguments))

        def keep(result: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            if not outputs:  # every micro-batch is the same text
                outputs.append(result[0].detach())
            return result[1].sum(), {}

        return output, keep

    return forward_step


def _attentions(models: list[Any]) -> list[Any]:
    return [layer.self_attention for model in models for layer in model.decoder.layers]


def record(
    models: list[Any], chunks: list[Any], tokens: Tensor, config: Any, view: ParallelView
) -> Recording | None:
    """Run tokens [T] once under the present plan; return the recording on rank 0, else None."""
    batch = Batch(
        tokens=tokens[None],
        labels=tokens[None],
        loss_mask=torch.ones(1, len(tokens)),
        samples=torch.zeros(1, dtype=torch.int64),
    )
    outputs: list[Tensor] = []
    for model in models:
        model.records_logits = True
    for attention in _attentions(models):
        attention.recorded = []
    try:
        with torch.no_grad():
            run_schedule(
                chunks,
                # the interleaved schedule takes multiples of the pipeline size only
                [batch] * view.pp_size,
                _forward_step(view, outputs),
                config,
                has_teacher=False,
                forward_only=True,
            )
        decided = {a.layer_number: a.recorded[:1] for a in _attentions(models)}
    finally:
        for model in models:
            model.records_logits = False
        for attention in _attentions(models):
            attention.recorded = None
    return _assemble(tokens, decided, outputs, models[0].architecture.vocab_size, view)


def _assemble(
    tokens: Tensor,
    decided: dict[int, list[Tensor]],
    outputs: list[Tensor],
    vocab_size: int,
    view: ParallelView,
) -> Recording | None:
    """Join each rank's heads, positions and vocabulary columns to whole tensors on rank 0."""
    mine = {
        "decided": {n: d[0][:, 0].t().float().cpu() for n, d in decided.items() if d},
        "logits": outputs[0][:, 0].float().cpu() if outputs else None,
        "rank": (view.pp_rank, view.tp_rank, view.cp_rank),
    }
    everyone: list[Any] | None = [None] * view.world_size if view.rank == 0 else None
    dist.gather_object(mine if view.dp_rank == 0 else None, everyone, dst=0)
    if everyone is None:
        return None
    ranks = sorted((r for r in everyone if r), key=lambda r: r["rank"])
    layers = sorted({n for r in ranks for n in r["decided"]})
    decision_logits = [
        torch.cat([r["decided"][n] for r in ranks if n in r["decided"]]) for n in layers
    ]
    parts = [r["logits"] for r in ranks if r["logits"] is not None]
    by_columns = [
        torch.cat(parts[i : i + view.cp_size]) for i in range(0, len(parts), view.cp_size)
    ]
    logits = torch.cat(by_columns, dim=-1)
    stacked = torch.stack(decision_logits) if decision_logits else torch.empty(0)
    return Recording(tokens.cpu(), stacked, logits[:, :vocab_size].contiguous())
