"""Every layout ranks channels and measures the teacher as transformers does in one process."""

from __future__ import annotations

from typing import Any

import pytest

from dms_train.app.channel_choice import candidate_channels, rank_channels
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.spec import PRESETS
from tests.support import channel_cases, tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROCESSES = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2_vp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}
ARCHITECTURE = channel_cases.architecture("qwen2")


def ranked(layout: dict[str, Any]) -> tuple[dict[int, float], float]:
    """The ranking of the channels and the teacher's loss, as every rank sees them."""
    parallel = ParallelOptions(**layout)
    view = groups.start(parallel, seed=1)
    options = TrainEngineOptions(parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7)
    source = channel_cases.random_weights(ARCHITECTURE)
    engine = McoreEngine(ARCHITECTURE, PRESETS["dms"], view, options, source)
    engine.attach_teacher(None)
    batches = tiny.microbatches(view.dp_rank, view.dp_size, groups=2)
    losses = rank_channels(engine, candidate_channels(ARCHITECTURE), batches)
    engine.reset_eviction_channel()  # of the student alone
    teacher_loss = engine.teacher_loss(batches)
    groups.stop(keep_process_group=True)
    return losses, teacher_loss


def work() -> dict[str, tuple[dict[int, float], float]]:
    rankings = {name: ranked(layout) for name, layout in LAYOUTS.items()}
    groups.stop()
    return rankings


@pytest.fixture(scope="module")
def rankings() -> dict[str, tuple[dict[int, float], float]]:
    first, second = values_of_ranks(work, PROCESSES)
    assert first == second
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranking_is_that_of_transformers(
    rankings: dict[str, tuple[dict[int, float], float]], layout: str
) -> None:
    source = channel_cases.random_weights(ARCHITECTURE)
    batches = tiny.microbatches(0, 1, groups=2)
    exact = channel_cases.divergences(ARCHITECTURE, "dms", source, batches)
    order = sorted(range(len(exact)), key=exact.__getitem__)
    found = {channel % len(exact): loss for channel, loss in rankings[layout][0].items()}
    assert list(found) == order
    assert list(found.values()) == pytest.approx([exact[channel] for channel in order], abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_the_teacher_is_that_of_transformers(
    rankings: dict[str, tuple[dict[int, float], float]], layout: str
) -> None:
    source, batches = channel_cases.random_weights(ARCHITECTURE), tiny.microbatches(0, 1, groups=2)
    exact = channel_cases.next_token_loss(ARCHITECTURE, source, batches)
    assert rankings[layout][1] == pytest.approx(exact, abs=1e-5)
