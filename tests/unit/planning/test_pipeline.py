"""The order of passes on pipeline stages, against the schedules written out by hand."""

from __future__ import annotations

import pytest

from dms_train.planning.pipeline import Pass, bubble, passes, warmup_passes


def in_flight(rank: int, pp: int, vp: int, microbatches: int) -> int:
    live = most = 0
    for step in passes(rank, pp, vp, microbatches):
        live += 1 if step.forward else -1
        most = max(most, live)
    assert live == 0
    return most


def test_one_stage_never_holds_two_microbatches():
    assert list(passes(0, 1, 1, 2)) == [Pass(True, 0), Pass(False, 0)] * 2


@pytest.mark.parametrize(("rank", "most"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_as_many_as_stages_follow(rank, most):
    assert in_flight(rank, 4, 1, 8) == most
    assert in_flight(rank, 4, 1, 2) == min(most, 2)


def test_interleaved_order_of_two_stages_and_chunks():
    written = "F0 F0 F1 F1 F0 B1 F0 B1 F1 B0 F1 B0 B1 B1 B0 B0"
    found = " ".join(f"{'FB'[not step.forward]}{step.chunk}" for step in passes(0, 2, 2, 4))
    assert found == written
    assert warmup_passes(1, 2, 2, 4) == 2


def test_the_bubble_shrinks_with_microbatches_and_chunks():
    assert bubble(1, 1, 8) == 0
    assert bubble(4, 1, 8) == 3 / 8
    assert bubble(4, 2, 8) == 3 / 16
