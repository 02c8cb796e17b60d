"""Steps of the engine leave nothing behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from dms_train.mcore.engine import McoreEngine
from dms_train.method.plan import LearningRate, StepPlan
from tests.support import tiny

WARM, STEPS = 5, 20
RATE = LearningRate(max_lr=1e-3, min_lr=1e-3, steps=100, warmup_steps=0, style="constant")


def objects() -> tuple[Counter[str], int]:
    """Objects that the collector sees, by type, and the bytes of all tensors."""
    gc.collect()
    found = gc.get_objects()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in found
        if type(each) in (torch.Tensor, torch.nn.Parameter)  # none of a tracer, without memory
        for storage in [each.untyped_storage()]
    }
    return Counter(type(each).__name__ for each in found), sum(storages.values())


@pytest.mark.filterwarnings("ignore")  # pytest keeps those that are not
def test_steps_and_evaluations_keep_no_object(build: Callable[..., McoreEngine]) -> None:
    engine = build("llama", "dms")
    engine.begin_stage(RATE)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            plan = StepPlan(
                step=step, stage_step=step, eviction="soft", target_cr=1 + step / 8, loss="lm"
            )
            engine.train_step(plan, [tiny.batch(step)])
            engine.evaluate(plan, [tiny.batch(100 + step)])

    run(0, WARM)
    objects()  # a tensor keeps its storage when that is first asked for
    before, held = objects()
    run(WARM, WARM + STEPS)
    after, holds = objects()
    assert holds <= held  # earlier tests may have left some that go
    more = after - before
    assert more.total() < STEPS, more  # less than one a step
