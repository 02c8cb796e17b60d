"""Collectives of a traced step, compared with the plan's count and with larger traces."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support import launch, trace_worker

LAYOUTS = trace_worker.COMPARED


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("trace") / "found.json"
    launch.checked(launch.module("tests.support.trace_worker", str(out), timeout=550))
    return json.loads(Path(out).read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "end"), list(product(LAYOUTS, ("first", "last"))))
def test_the_plan_counts_the_bytes_that_a_step_sends(
    found: dict[str, Any], layout: str, end: str
) -> None:
    """The plan leaves out the statistics of losses and norms, which are small."""
    case = found[layout][end]
    sent, planned = case["sent"], case["planned"]
    for group in sent | planned:
        expected = pytest.approx(planned.get(group, 0.0), rel=0.01, abs=1000)
        assert sent.get(group, 0.0) == expected, group


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", trace_worker.MODELS)
def test_few_layers_short_samples_and_few_microbatches_stand_for_many(
    found: dict[str, Any], model: str
) -> None:
    """A step of the whole configuration has the calls and bytes that were extended to it."""
    extended, real = found[model]["extended"], found[model]["real"]
    assert extended.keys() == real.keys()
    for name, (calls, size) in real.items():
        assert extended[name][1] == pytest.approx(size, rel=1e-9), name
        if "data" not in name:  # the number of gradient buckets depends on their sizes
            assert extended[name][0] == pytest.approx(calls, rel=1e-9), name


@pytest.mark.timeout(600)
def test_ddp_bucket_size_divides_the_reduction_of_gradients(found: dict[str, Any]) -> None:
    """The model has 2.3 million parameters; each layer of it exceeds a bucket of 100,000."""
    default, small = found["reductions"]
    assert default == 1
    assert small > 8
