"""Figures of a report as SVG, which a page contains and which shows a point's numbers on hover."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from dms_train.evaluation.analysis.comparison import Cost, Margin, Mark, line

_WIDTH, _HEIGHT = 460, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 28, 44
_COLORS = {"Vanilla": "#7b4fa3", "DMS": "#3c9a3c"}  # as in the paper
_OTHERS = (
    *("#d29a00", "#2b7bba", "#c0392b", "#5f6b6d", "#e377c2", "#17a2a2", "#8c564b", "#1f3a93"),
)
_KEYS_IN_ROW, _KEY_HEIGHT = 4, 16
_STEPS = (0.5, 1, 2, 5, 10, 20)  # accuracy points between two ticks
_MOST_STEPS = 5
_LETTER, _LINE = 4.6, 9  # pixels of a label
Box = tuple[float, float, float, float]


def color(method: str, methods: Sequence[str]) -> str:
    """The colour of a method in all figures of a page."""
    others = [name for name in methods if name not in _COLORS]
    return _COLORS.get(method) or _OTHERS[others.index(method) % len(_OTHERS)]


class _Axes:
    """Pixels of costs, on a logarithmic scale, and of accuracies."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        costs = [max(mark.cost, 1e-9) for mark in marks]
        self.low, self.high = min(costs) / 1.15, max(costs) * 1.15
        accuracies = [100 * mark.accuracy for mark in marks]
        least, most = min(accuracies), max(accuracies)
        step = next((s for s in _STEPS if most - least <= (_MOST_STEPS - 1) * s), _STEPS[-1])
        self.bottom, self.top = step * math.floor(least / step), step * math.ceil(most / step)
        if self.top == self.bottom:
            self.bottom, self.top = (0, step) if least == 0 else (self.bottom - step, self.top)
        self.step = step

    def x(self, cost: float) -> float:
        share = math.log(max(cost, 1e-9) / self.low) / math.log(self.high / self.low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, accuracy: float) -> float:
        share = (100 * accuracy - self.bottom) / (self.top - self.bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def scaling_chart(title: str, marks: Sequence[Mark], cost: Cost, methods: Sequence[str]) -> str:
    """Accuracy against a cost, with the frontier of each method (paper, Figures 3 and 4)."""
    axes = _Axes(marks)
    parts, best = [_frame(title, axes, cost)], set[tuple[str, float, float]]()
    for method in methods:
        paint, corners = color(method, methods), line(marks, method)
        best |= {(method, *point) for point in corners}
        path = " ".join(f"{axes.x(p.budget):.1f},{axes.y(p.accuracy):.1f}" for p in corners)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{paint}'/>")
    taken: list[Box] = []
    for mark in marks:
        named = (mark.method, mark.cost, mark.accuracy) in best
        label = _label(mark, axes, taken) if named else ""
        parts.append(_dot(mark, axes, color(mark.method, methods), cost, label, named))
    return _svg(title, "".join(parts))


def standalone(svg: str, methods: Sequence[str]) -> str:
    """A figure as a file of its own, with the colours of the methods below it."""
    head, content = svg.split(">", 1)
    content = re.sub(r"</?a[^>]*>", "", content)  # there is nothing to link to
    height = int(head.rsplit(" ", 1)[1].strip("'"))
    rows = -(-len(methods) // _KEYS_IN_ROW)
    total = height + rows * _KEY_HEIGHT + 4
    keys = "".join(
        f"<rect x='{x}' y='{y}' width='10' height='10' fill='{color(name, methods)}'/>"
        f"<text x='{x + 14}' y='{y + 9}'>{html.escape(name)}</text>"
        for number, name in enumerate(methods)
        for x in [_LEFT + number % _KEYS_IN_ROW * (_WIDTH - _LEFT) // _KEYS_IN_ROW]
        for y in [height + number // _KEYS_IN_ROW * _KEY_HEIGHT]
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {total}' width='{_WIDTH}' "
        "font-family='sans-serif' font-size='11'><style>.title { font-weight: 600 } "
        ".budget { font-size: 9px; fill: #555 }</style>"
        f"<rect width='{_WIDTH}' height='{total}' fill='#fff'/>{content.removesuffix('</svg>')}"
        f"{keys}</svg>\n"
    )


def _dot(mark: Mark, axes: _Axes, paint: str, cost: Cost, label: str, best: bool) -> str:
    """A point with what it says on hover; smaller and paler where it is not on the frontier."""
    size = "r='4.5'" if best else "r='3' fill-opacity='.45'"
    x, y = axes.x(mark.cost), axes.y(mark.accuracy)
    words = (
        f"{mark.method} {mark.budget}: {100 * mark.accuracy:.1f} %, {mark.cost:,.1f} {cost.title}"
    )
    dot = (
        f"<circle cx='{x:.1f}' cy='{y:.1f}' {size} fill='{paint}'>"
        f"<title>{html.escape(words)}</title></circle>{label}"
    )
    return f"<a href='#run-{mark.run[:12]}'>{dot}</a>" if mark.run else dot


def _label(mark: Mark, axes: _Axes, taken: list[Box]) -> str:
    """The budget beside a point of a frontier; empty where it would cover another label.

    Args:
        mark: The point.
        axes: Of the figure.
        taken: Where labels are already; this one is added.
    """
    words, y = str(mark.budget), axes.y(mark.accuracy)
    left = axes.x(mark.cost) > _WIDTH * 0.8
    x = axes.x(mark.cost) - 6 if left else axes.x(mark.cost) + 6
    start = x - _LETTER * len(words) if left else x
    base = y + 12 if y + 12 < _HEIGHT - _BOTTOM else y - 6
    box = (start, base - _LINE, start + _LETTER * len(words), base)
    if any(_overlap(box, other) for other in taken):
        return ""
    taken.append(box)
    where = f"x='{x:.1f}' text-anchor='end'" if left else f"x='{x:.1f}'"
    return f"<text {where} y='{base:.1f}' class='budget'>{words}</text>"


def _overlap(first: Box, second: Box) -> bool:
    return all(first[i] < second[i + 2] and second[i] < first[i + 2] for i in (0, 1))


def _frame(title: str, axes: _Axes, cost: Cost) -> str:
    base = _HEIGHT - _BOTTOM
    parts = [
        f"<text x='{_LEFT}' y='16' class='title'>{html.escape(title)}</text>",
        f"<path d='M{_LEFT} {_TOP}V{base}H{_WIDTH - _RIGHT}' fill='none' stroke='#888'/>",
        f"<text x='{(_WIDTH + _LEFT) / 2}' y='{_HEIGHT - 8}' text-anchor='middle'>"
        f"{cost.title} of a document (logarithmic)</text>",
    ]
    for tick in _ticks(axes.low, axes.high):
        x = axes.x(tick)
        parts.append(
            f"<path d='M{x:.1f} {base}v4' stroke='#888'/>"
            f"<text x='{x:.1f}' y='{base + 17}' text-anchor='middle'>{_short(tick)}</text>"
        )
    for number in range(round((axes.top - axes.bottom) / axes.step) + 1):
        value = axes.bottom + number * axes.step
        y = axes.y(value / 100)
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{value:g} %</text>")
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    return [tick for tick in found if low <= tick <= high]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def margin_chart(title: str, margins: Sequence[Margin], methods: Sequence[str]) -> str:
    """Margins as bars (paper, Figure 1)."""
    shown = [(m, m.value) for m in margins if m.value is not None]
    reach = max((abs(value) for _, value in shown), default=0.0) or 1.0
    height, middle, scale = 34 + 26 * len(shown), 300, 110 / reach
    parts = [f"<text x='8' y='16' class='title'>{html.escape(title)}</text>"]
    for number, (found, value) in enumerate(shown):
        y, size = 30 + 26 * number, abs(value) * scale
        words = f"{found.task}: {found.first} - {found.second}"
        parts.append(
            f"<text x='8' y='{y + 13}'>{html.escape(words)}</text>"
            f"<rect x='{middle if value >= 0 else middle - size:.1f}' y='{y}' width='{size:.1f}' "
            f"height='18' fill='{color(found.first, methods)}'>"
            f"<title>{html.escape(words)}: {value:+.2f} points</title></rect>"
            f"<text x='{middle + 114}' y='{y + 13}'>{value:+.1f}</text>"
        )
    return _svg(title, "".join(parts), height)


def _svg(title: str, content: str, height: int = _HEIGHT) -> str:
    return (
        f"<svg role='img' aria-label='{html.escape(title, quote=True)}' "
        f"viewBox='0 0 {_WIDTH} {height}'>{content}</svg>"
    )
