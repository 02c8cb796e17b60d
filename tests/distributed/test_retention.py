"""What each KV head keeps is the same in every layout and on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from tests.support import launch
from tests.support.retention_worker import LAYOUTS, PROCESSES

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("retention") / "out"
    launch.checked(launch.workers(PROCESSES, "tests.support.retention_worker", str(out)))
    first, second = (json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(PROCESSES))
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
