"""Figures: round ticks that hold every point, and labels that can be read."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from dms_train.evaluation.analysis.charts import scaling_chart
from dms_train.evaluation.analysis.comparison import READS, Mark
from dms_train.evaluation.scaling.budgets import Budget

TICK = re.compile(r"y='([\d.]+)' text-anchor='end'>(-?[\d.]+) %<")
LABEL = re.compile(
    r"<text x='([\d.]+)'( text-anchor='end')? y='([\d.]+)' class='budget'>([^<]+)</text>"
)
CIRCLE = re.compile(r"cy='([\d.]+)'")


def drawn(accuracies: list[float], costs: list[float] | None = None) -> str:
    costs = costs or [10.0 * 2**i for i in range(len(accuracies))]
    marks = [
        Mark("DMS", Budget(0.25 * (i + 1), 1, 4), cost, accuracy, "")
        for i, (cost, accuracy) in enumerate(zip(costs, accuracies, strict=True))
    ]
    return scaling_chart("Task", marks, READS, ["DMS"])


@pytest.mark.parametrize(
    "accuracies",
    [[0.0], [1.0], [0.5, 0.5], [0.43], [0.207, 0.9875], [0.0, 1.0], [0.981, 0.984, 0.9925]],
)
def test_ticks_are_round_and_every_point_lies_between_them(accuracies: list[float]) -> None:
    svg = drawn(accuracies)
    ticks = {float(value): float(y) - 4 for y, value in TICK.findall(svg)}  # middle of a digit
    values = sorted(ticks)
    steps = {round(b - a, 9) for a, b in itertools.pairwise(values)}
    assert len(steps) == 1
    (step,) = steps
    assert step in (0.5, 1, 2, 5, 10, 20)
    assert all(value % step == 0 and 0 <= value <= 100 for value in values)
    low, high = values[0], values[-1]
    circles = [float(y) for y in CIRCLE.findall(svg)]
    for y, accuracy in zip(circles, accuracies, strict=True):
        assert low <= 100 * accuracy <= high
        share = (100 * accuracy - low) / (high - low)
        expected = ticks[low] + share * (ticks[high] - ticks[low])
        assert y == pytest.approx(expected, abs=0.1)


def test_labels_do_not_cover_each_other_or_the_axis() -> None:
    draw = random.Random(0)
    costs = sorted(10 ** draw.uniform(1, 1.5) for _ in range(40))
    svg = drawn(sorted(draw.random() for _ in range(40)), costs)
    boxes = []
    for x, end, y, words in LABEL.findall(svg):
        width = 4.5 * len(words)
        left = float(x) - width if end else float(x)
        boxes.append((left, float(y) - 8, left + width, float(y)))
    assert 2 <= len(boxes) < 40
    for first, second in itertools.combinations(boxes, 2):
        apart = (
            first[2] <= second[0]
            or second[2] <= first[0]
            or first[3] <= second[1]
            or second[3] <= first[1]
        )
        assert apart
    base = max(float(y) - 4 for y, _ in TICK.findall(svg))
    assert all(box[3] < base for box in boxes)


def test_points_off_the_frontier_are_paler_and_have_no_label() -> None:
    svg = drawn([0.2, 0.6, 0.4])
    assert len(LABEL.findall(svg)) == 2
    assert svg.count("fill-opacity") == 1
