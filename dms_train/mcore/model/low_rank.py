"""Collection of the adapters of all layers, as tensors in PEFT's format."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dms_train.hf.adapter import peft_names
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters

_Changes = dict[tuple[int, str], adapters.LowRank]  # by layer and projection


class AdapterTensors(NamedTuple):
    """Adapters of a whole model.

    Attributes:
        tensors: Tensors on the CPU by PEFT's names, float32.
        scale: Factor of the products of two matrices.
        base_rows: Frozen rows of the q projection that are replaced, for each layer with decisions.
    """

    tensors: dict[str, Tensor]
    scale: float
    base_rows: list[Tensor]


def collect(
    models: list[Any], view: ParallelView, num_layers: int, scale: float
) -> AdapterTensors | None:
    """Collect the adapters of model chunks on rank 0; every rank calls it, the others get None."""
    own = _own(models)
    sends = view.tp_rank == 0 and view.dp_rank == 0 and view.cp_rank == 0
    everyone = groups.of_ranks(lambda: own if sends else {})
    if view.rank != 0:
        return None
    changes = {place: change for rank in everyone for place, change in rank.items()}
    rows = [change.replaced for (_, target), change in sorted(changes.items()) if target == "q"]
    base_rows = [own for own in rows if len(own)]
    return AdapterTensors(_named(changes, num_layers), scale, base_rows)


def _own(models: list[Any]) -> _Changes:
    """Return the changes of this rank's layers on the CPU."""
    changes: _Changes = {}
    for layer, target, (down, up, bias, replaced) in adapters.low_rank_changes(models):
        bias = None if bias is None else bias.cpu()
        changes[layer, target] = adapters.LowRank(down.cpu(), up.cpu(), bias, replaced.cpu())
    return changes


def _named(changes: _Changes, num_layers: int) -> dict[str, Tensor]:
    """Give a projection the same rank in every layer, because PEFT has no rank for each layer."""
    tensors = {}
    for target in sorted({target for _, target in changes}):
        own = [change for (_, name), change in changes.items() if name == target]
        rank = max(len(change.down) for change in own)
        none = own[0]._replace(down=own[0].down[:0], up=own[0].up[:, :0], bias=None)
        for layer in range(num_layers):
            change = changes.get((layer, target), none)
            missing = rank - len(change.down)
            down, up, bias = peft_names(f"model.layers.{layer}.self_attn.{target}_proj")
            tensors[down] = F.pad(change.down, (0, 0, 0, missing))
            tensors[up] = F.pad(change.up, (0, missing))
            if change.bias is not None:
                tensors[bias] = change.bias
    return tensors
