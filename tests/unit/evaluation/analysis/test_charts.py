"""Figures: every point at its place, and labels that can be read."""

from __future__ import annotations

import itertools
import random
from typing import Any
from xml.etree import ElementTree

import pytest

from dms_train.evaluation.analysis import charts
from dms_train.evaluation.analysis.charts import margin_chart, scaling_chart
from dms_train.evaluation.analysis.comparison import READS, Margin, Mark
from dms_train.evaluation.scaling.budgets import Budget

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


def marks(accuracies: list[float], costs: list[float] | None = None) -> list[Mark]:
    costs = costs or [10.0 * 2**i for i in range(len(accuracies))]
    return [
        Mark("DMS", Budget(0.25 * (i + 1), 1, 4), cost, accuracy, "0123456789abcdef")
        for i, (cost, accuracy) in enumerate(zip(costs, accuracies, strict=True))
    ]


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Axes of the figures that are written."""
    written: list[Any] = []
    write = charts._svg

    def kept(figure: Any, title: str, texts: Any) -> str:
        text = write(figure, title, texts)
        written.extend(figure.axes)
        return text

    monkeypatch.setattr(charts, "_svg", kept)
    return written


@pytest.mark.parametrize(
    "accuracies",
    [[0.0], [1.0], [0.5, 0.5], [0.43], [0.207, 0.9875], [0.0, 1.0], [0.981, 0.984, 0.9925]],
)
def test_every_point_lies_within_the_axes(axes: list[Any], accuracies: list[float]) -> None:
    scaling_chart("Task", marks(accuracies), READS, ["DMS"])
    (drawn,) = axes
    points = [curve.get_xydata()[0].tolist() for curve in drawn.lines if curve.get_gid()]
    assert points == [[10.0 * 2**i, 100 * accuracy] for i, accuracy in enumerate(accuracies)]
    low, high = drawn.get_ylim()
    assert all(low < accuracy < high for _, accuracy in points)
    assert drawn.get_xscale() == "log"


def test_a_point_shows_its_numbers_and_leads_to_its_run() -> None:
    found = marks([0.2, 0.6, 0.4])
    image = ElementTree.fromstring(scaling_chart("Task", found, READS, ["DMS"]))
    assert [title.text for title in image.iter(f"{SVG}title")] == [
        "DMS 0.25-1-4: 20.0 %, 10.0 KV reads",
        "DMS 0.5-1-4: 60.0 %, 20.0 KV reads",
        "DMS 0.75-1-4: 40.0 %, 40.0 KV reads",
    ]
    assert [link.attrib for link in image.iter(f"{SVG}a")] == 3 * [{LINK: "#run-0123456789ab"}]
    texts = {text.text for text in image.iter(f"{SVG}text")}
    # units on the axes, the name of the method, and the budgets of the frontier alone
    assert texts > {"KV reads of a document (cache slots)", "accuracy (%)", "DMS"}
    assert texts & {"0.25-1-4", "0.5-1-4", "0.75-1-4"} == {"0.25-1-4", "0.5-1-4"}
    without = scaling_chart("Task", found, READS, ["DMS"], links=False)
    assert "#run-" not in without


def test_labels_do_not_cover_each_other_or_the_axis(axes: list[Any]) -> None:
    draw = random.Random(0)
    costs = sorted(10 ** draw.uniform(1, 1.5) for _ in range(40))
    scaling_chart("Task", marks(sorted(draw.random() for _ in range(40)), costs), READS, ["DMS"])
    (drawn,) = axes
    boxes = [text.get_window_extent() for text in drawn.texts]
    assert 2 <= len(boxes) < 40
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.y0 >= drawn.bbox.y0 and box.x0 >= drawn.bbox.x0 for box in boxes)


def test_points_off_the_frontier_are_paler(axes: list[Any]) -> None:
    scaling_chart("Task", marks([0.2, 0.6, 0.4]), READS, ["DMS"])
    (drawn,) = axes
    dots = [curve for curve in drawn.lines if curve.get_gid()]
    assert [dot.get_alpha() is None for dot in dots] == [True, True, False]


def test_margins_are_bars_of_their_length(axes: list[Any]) -> None:
    margins = [
        Margin("Sums", "DMS", "Vanilla", 12.25, None),
        Margin("Sums", "H2O", "Vanilla", -3.0, None),
        Margin("Words", "DMS", "Vanilla", None, None),
    ]
    svg = margin_chart("Margins", margins, ["Vanilla", "DMS", "H2O"])
    (drawn,) = axes
    assert [bar.get_width() for bar in drawn.patches] == [12.25, -3.0]
    assert "Sums: DMS - Vanilla: +12.25 points" in svg
    assert "margin (accuracy points)" in svg
