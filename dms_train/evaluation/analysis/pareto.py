"""Pareto frontiers of accuracy against a budget, and the margin between two (paper, appendix E)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BudgetPoint(NamedTuple):
    """One measurement.

    Attributes:
        budget: KV reads, peak tokens or seconds.
        accuracy: From 0 to 1.
    """

    budget: float
    accuracy: float


def frontier(points: Iterable[BudgetPoint]) -> list[BudgetPoint]:
    """Return the points that no other point dominates, by rising budget.

    A point dominates another if it is at least as good in budget and accuracy, and better in one of
    them.
    """
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda p: (p.budget, -p.accuracy)):
        if not kept or point.accuracy > kept[-1].accuracy:
            kept.append(point)
    return kept


def accuracy_at(line: Sequence[BudgetPoint], budget: float) -> float:
    """Interpolate the accuracy of a frontier linearly at a budget within its range."""
    after = min(bisect_right([p.budget for p in line], budget), len(line) - 1)
    right = line[after]
    left = line[max(after - 1, 0)]
    if right.budget == left.budget:
        return right.accuracy
    share = (budget - left.budget) / (right.budget - left.budget)
    return left.accuracy + share * (right.accuracy - left.accuracy)


def margin(first: Iterable[BudgetPoint], second: Iterable[BudgetPoint]) -> float | None:
    """Return the mean difference of two frontiers over their common budgets, in accuracy points.

    Args:
        first: Points of one method.
        second: Points of the other.

    Returns:
        Above 0 where the first is better; None if no interval of budgets is common.
    """
    a, b = frontier(first), frontier(second)
    if not a or not b:
        return None
    low, high = max(a[0].budget, b[0].budget), min(a[-1].budget, b[-1].budget)
    if low >= high:
        return None
    inside = {p.budget for p in (*a, *b) if low < p.budget < high}
    knots = [low, *sorted(inside), high]
    heights = [accuracy_at(a, x) - accuracy_at(b, x) for x in knots]
    area = sum(
        (right - left) * (first_height + second_height) / 2
        for left, right, first_height, second_height in zip(
            knots, knots[1:], heights, heights[1:], strict=False
        )
    )
    return 100 * area / (high - low)
