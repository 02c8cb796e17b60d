"""Intervals: where they lie, how wide they are, and what is resampled."""

from __future__ import annotations

import math
import random

import pytest

from dms_train.evaluation.bootstrap import ratio


def test_width_of_a_coin():
    """Half the width of 400 fair throws is 1.96 * sqrt(0.25 / 400)."""
    throws = [float(n % 2) for n in range(400)]
    found = ratio(throws, [1.0] * 400)
    assert found.value == 0.5
    half = 1.96 * math.sqrt(0.25 / 400)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert found.low < 0.5 < found.high
    assert ratio(throws, [1.0] * 400) == found


def test_what_never_varies_has_no_interval():
    found = ratio([3.0] * 20, [4.0] * 20)
    assert (found.value, found.low, found.high) == (0.75, 0.75, 0.75)


def test_problems_of_a_sheet_count_once():
    """All or nothing on sheets of 4 is as uncertain as single problems, not as four times more."""
    draw = random.Random(1)
    hits = [float(draw.random() < 0.6) for _ in range(100)]
    singles = ratio(hits, [1.0] * 100)
    sheets = ratio([4 * hit for hit in hits], [4.0] * 100)
    assert (sheets.low, sheets.high) == (singles.low, singles.high)
    apart = ratio([hit for hit in hits for _ in range(4)], [1.0] * 400)
    assert apart.high - apart.low < 0.6 * (sheets.high - sheets.low)


def test_entries_are_weighted_by_their_size():
    assert ratio([0.0, 9.0], [1.0, 9.0]).value == 0.9
