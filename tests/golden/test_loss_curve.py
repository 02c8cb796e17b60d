"""A tiny run gives the recorded metrics: the same bits where the arithmetic is the recorded one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import loss_curve


@pytest.mark.timeout(300)
def test_the_metrics_of_a_run_are_the_recorded_ones(tmp_path: Path) -> None:
    recorded_with, expected = loss_curve.recorded()
    found = loss_curve.measure(tmp_path)
    differing = loss_curve.differences(
        expected, found, exact=loss_curve.versions() == recorded_with
    )
    hint = "python -m tests.golden.loss_curve prints this; --write stores the new values"
    assert not differing, "\n".join([*differing, hint])
