"""Each KV head keeps the same in every layout and on every rank."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROCESSES = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "pp2_vp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def evaluated(layout: dict[str, Any]) -> StepResult:
    """The result of one evaluation, as every rank sees it."""
    parallel = ParallelOptions(**layout)
    view = groups.start(parallel, seed=1)
    architecture = tiny.architecture("llama")
    spec = PRESETS["dms"].override(window=4, alpha_offset=0.5)
    options = TrainEngineOptions(
        parallel=parallel, optim=OptimOptions(lr=1e-3), seed=7, trains=False
    )
    student = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=0.01)
    engine = McoreEngine(architecture, spec, view, options, student)
    plan = StepPlan(eviction="hard", channel_scale=0.0, loss="lm")
    result = engine.evaluate(plan, tiny.microbatches(view.dp_rank, view.dp_size))
    groups.stop(keep_process_group=True)
    return result


def work() -> dict[str, dict[str, Any]]:
    found = {name: evaluated(layout) for name, layout in LAYOUTS.items()}
    groups.stop()
    return {name: {"kept": r.kept, "cr_factor": r.cr_factor} for name, r in found.items()}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    first, second = values_of_ranks(work, PROCESSES)
    assert first == second
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eviction_channels_are_those_of_data_parallel_copies(rows, layout):
    numpy.testing.assert_allclose(rows[layout]["kept"], rows["dp2"]["kept"], atol=1e-12)


def test_eviction_channels_differ_and_their_mean_is_the_ratio(rows):
    kept = numpy.array(rows["dp2"]["kept"])
    assert kept.shape == (4, 4)
    assert len(set(kept.ravel().tolist())) > 4
    assert 1 / kept.mean() == pytest.approx(rows["dp2"]["cr_factor"])
