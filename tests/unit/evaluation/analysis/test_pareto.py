"""Margins against worked examples, fine sums, and what the paper prints."""

from __future__ import annotations

import random

import pytest

from dms_train.evaluation.analysis.pareto import BudgetPoint, accuracy_at, frontier, margin
from dms_train.evaluation.analysis.published import published


def points(*pairs: tuple[float, float]) -> list[BudgetPoint]:
    return [BudgetPoint(*pair) for pair in pairs]


A = points((1, 0.2), (2, 0.3), (4, 0.5))
B = points((2, 0.2), (4, 0.4), (8, 0.45))


def test_the_worked_example():
    assert margin(A, B) == pytest.approx(10.0, abs=1e-12)
    assert margin(B, A) == pytest.approx(-10.0, abs=1e-12)
    assert margin(A, A) == 0.0


def test_no_common_interval_has_no_margin():
    assert margin(A, points((5, 0.1), (6, 0.2))) is None
    assert margin(A, points((4, 0.1), (6, 0.2))) is None  # a single common budget
    assert margin(A, points((2, 0.9))) is None
    assert margin(A, []) is None


def test_dominated_points_change_nothing():
    worse = [*A, *points((3, 0.3), (4, 0.2), (9, 0.5), (1, 0.1))]
    assert frontier(worse) == A
    assert margin(worse, B) == margin(A, B)


def test_a_frontier_equals_its_definition():
    rng = random.Random(0)
    for _ in range(100):
        drawn = points(*((rng.randint(1, 9), rng.randint(0, 9) / 9) for _ in range(12)))
        kept = {
            p
            for p in drawn
            if not any(q != p and q.budget <= p.budget and q.accuracy >= p.accuracy for q in drawn)
        }
        assert frontier(drawn) == sorted(kept)


def test_a_margin_equals_a_fine_sum():
    rng = random.Random(1)
    for _ in range(30):
        a, b = (points(*((rng.uniform(1, 100), rng.random()) for _ in range(8))) for _ in range(2))
        found = margin(a, b)
        x, y = frontier(a), frontier(b)
        low, high = max(x[0].budget, y[0].budget), min(x[-1].budget, y[-1].budget)
        if found is None:
            assert low >= high
            continue
        steps = 20_000
        middle = [low + (high - low) * (n + 0.5) / steps for n in range(steps)]
        summed = sum(accuracy_at(x, m) - accuracy_at(y, m) for m in middle) / steps
        assert found == pytest.approx(100 * summed, abs=0.01)
        assert margin(b, a) == pytest.approx(-found)


def test_the_averages_that_the_paper_prints_follow_from_its_table():
    """Section 5.1 averages Table 5 over the model sizes; AIME 24 is 11.57 and printed as 11.5."""
    (label, *cells), *_ = published()["table5"]["rows"]
    assert label == "DMS vs Vanilla"
    means = [sum(cells[n : n + 3]) / 3 for n in range(0, 12, 3)]
    assert means == pytest.approx([11.5, 2.3, 5.5, 8.3], abs=0.07)
    assert cells[2::3] == [9.1, 1.6, 7.6, 9.6]  # 32B, in the abstract but for MATH 500


def test_published_tables_agree_where_they_print_the_same():
    tables = published()
    first, second = (
        {row[0]: dict(zip(tables[name]["columns"], row[1:], strict=True)) for row in rows}
        for name, rows in ((n, tables[n]["rows"]) for n in ("table1", "table2"))
    )
    for task in ("NIAH", "VT"):
        for method, value in first[task].items():
            assert second[method][f"{task} 4K"] == value
