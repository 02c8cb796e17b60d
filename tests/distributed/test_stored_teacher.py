"""Distributions that one layout stored serve every other layout in place of the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.data.teacher_logits import StoredTeacher, write_part
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROCESSES, SAMPLES = 2, 8
PIPELINE = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": PIPELINE,
    "pp2_vp2": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2},
}
ARCHITECTURE = tiny.architecture("llama")
SPEC = PRESETS["dms"].override(window=4, alpha_offset=0.5)
ORIGINAL = RandomWeights(ARCHITECTURE, 2, 0.2)
PLAN = StepPlan(eviction="soft", channel_scale=0.0, target_cr=2.0, loss="distill")


def begin(name: str) -> tuple[ParallelView, TrainEngineOptions, list[Batch]]:
    """Start a layout; return its view, options and this rank's micro-batches."""
    parallel = ParallelOptions(**LAYOUTS[name])
    view = groups.start(parallel, seed=1)
    options = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7)
    return view, options, tiny.microbatches(view.dp_rank, view.dp_size)


def store(name: str, folder: Path) -> None:
    view, options, batches = begin(name)
    teacher = McoreEngine(ARCHITECTURE, SPEC, view, replace(options, trains=False), ORIGINAL)
    stored = teacher.top_logits(batches, ARCHITECTURE.vocab_size)
    if stored:
        write_part(folder / name, str(view.dp_rank), batches, stored)
    groups.stop(keep_process_group=True)


def gradients(name: str, folder: Path | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step, with the teacher itself if there is no folder."""
    view, options, batches = begin(name)
    student = tiny.SmallEvictionChannels(ARCHITECTURE, 1, SPEC.channel, factor=0.01)
    options = replace(options, reads_teacher=folder is not None)
    engine = McoreEngine(ARCHITECTURE, SPEC, view, options, student)
    if folder is None:
        engine.attach_teacher(ORIGINAL)
    elif view.is_last_stage:
        reader = StoredTeacher(folder, SAMPLES)
        batches = [b._replace(teacher=reader.read(b.samples.tolist(), b.tokens)) for b in batches]
    loss = engine.forward_backward(PLAN, batches).loss
    found = engine.hf_gradients()
    groups.stop(keep_process_group=True)
    return loss, found


def work(out: Path) -> dict[str, Any]:
    for name in LAYOUTS:
        store(name, out)
    writers = dict(zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True))
    found = {
        name: (gradients(name, None), gradients(name, out / writer))
        for name, writer in writers.items()
    }
    groups.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return values_of_ranks(work, PROCESSES, tmp_path_factory.mktemp("stored"))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_the_teacher(found: dict[str, Any], layout: str) -> None:
    (exact_loss, exact), (loss, own) = found[layout]
    assert loss == pytest.approx(exact_loss, rel=1e-4)  # stored in 16 bits
    for name, gradient in exact.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=max(2e-3 * scale, 1e-6))
