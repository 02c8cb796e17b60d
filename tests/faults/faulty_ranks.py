"""Ranks of `dms-train` in which something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from dms_train.mcore.engine import McoreEngine
from tests.support.ranks import dms_train
from tests.support.stalls import hang_the_disk

Prepare = Callable[[int], None]


def train(prepare: Prepare | None, *words: str) -> int:
    """Run `dms-train WORDS` after `prepare`, which is called with the rank."""
    if prepare is not None:
        prepare(int(os.environ["RANK"]))
    return dms_train(*words)


def hang_rank_2(first: int, rank: int) -> None:
    if rank == 2:
        hang_the_disk(first)


def inject_nan(rank: int, steps: tuple[int, ...]) -> None:
    """Let rank 3 of this process's engine compute gradients that are not finite in these steps."""
    inner = McoreEngine._gradients

    def not_finite(engine: McoreEngine, plan: Any, batches: Any) -> Any:
        totals = inner(engine, plan, batches)
        if rank == 3 and plan.step + 1 in steps:
            for parameter in engine._models[0].parameters():
                parameter.main_grad.fill_(torch.nan)
        return totals

    McoreEngine._gradients = not_finite  # type: ignore[method-assign]
