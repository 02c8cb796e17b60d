"""Figures of a report as SVG, drawn by matplotlib; a point shows its numbers on hover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from dms_train.evaluation.analysis.comparison import Cost, Margin, Mark, line
from dms_train.evaluation.analysis.needles import NeedleCell, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"Vanilla": "#7b4fa3", "DMS": "#3c9a3c"}  # colours of the paper
_OTHERS = (
    *("#d29a00", "#2b7bba", "#c0392b", "#5f6b6d", "#e377c2", "#17a2a2", "#8c564b", "#1f3a93"),
)
_SMALLEST_COST = 1e-9  # a logarithmic axis cannot show a cost of 0
_SVG = "http://www.w3.org/2000/svg"
# Without these, matplotlib writes its own address and the date into each figure.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def color(method: str, methods: Sequence[str]) -> str:
    """Return the colour of a method in all figures of a page."""
    others = [name for name in methods if name not in _COLORS]
    return _COLORS.get(method) or _OTHERS[others.index(method) % len(_OTHERS)]


def scaling_chart(
    title: str, marks: Sequence[Mark], cost: Cost, methods: Sequence[str], *, links: bool = True
) -> str:
    """Draw accuracy against a cost, with the frontier of each method (paper, Figures 3 and 4).

    Args:
        title: Title of the figure.
        marks: Points.
        cost: Cost on the horizontal axis.
        methods: All methods of the page, which decide the colours.
        links: Link each point to the chains of its run on the same page.
    """
    figure, axes = _figure(title, height=3.6)
    best = set[tuple[str, float, float]]()
    for method in methods:
        corners = line(marks, method)
        best |= {(method, *point) for point in corners}
        costs, accuracies = [p.budget for p in corners], [100 * p.accuracy for p in corners]
        axes.plot(costs, accuracies, color=color(method, methods), label=method, linewidth=1)
    texts, labels = {}, []
    for number, mark in enumerate(marks):
        named = (mark.method, mark.cost, mark.accuracy) in best
        point = (max(mark.cost, _SMALLEST_COST), 100 * mark.accuracy)
        # points off the frontier are smaller and paler
        look = {"markersize": 6.5} if named else {"markersize": 4.5, "alpha": 0.45}
        (dot,) = axes.plot(*point, "o", color=color(mark.method, methods), gid=f"p{number}", **look)
        dot.set_url(f"#run-{mark.run[:12]}" if mark.run and links else None)
        texts[f"p{number}"] = _point_text(mark, cost)
        if named:
            labels.append(axes.annotate(str(mark.budget), point, **_BESIDE))
    _scale(axes, cost)
    axes.legend(fontsize=8, loc="best")
    _remove_overlapping(figure, labels)
    return _svg(figure, title, texts)


_BESIDE = {"xytext": (4, -9), "textcoords": "offset points", "fontsize": 7, "color": "#555"}


def _point_text(mark: Mark, cost: Cost) -> str:
    accuracy = f"{100 * mark.accuracy:.1f} %"
    return f"{mark.method} {mark.budget}: {accuracy}, {mark.cost:,.1f} {cost.title}"


def _scale(axes: Any, cost: Cost) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.set(xlabel=f"{cost.title} of a document ({cost.unit})", ylabel="accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)


def _remove_overlapping(figure: Figure, labels: Sequence[Any]) -> None:
    """Remove each label that would cover an earlier one or leave the axes."""
    figure.draw_without_rendering()
    kept: list[Any] = []
    for label in labels:
        box = label.get_window_extent()
        inside = label.axes.bbox.contains(box.x0, box.y0) and box.x1 <= figure.bbox.x1
        if inside and not any(box.overlaps(other) for other in kept):
            kept.append(box)
        else:
            label.remove()


def margin_chart(title: str, margins: Sequence[Margin], methods: Sequence[str]) -> str:
    """Draw margins as bars (paper, Figure 1)."""
    shown = [(m, m.value) for m in margins if m.value is not None]
    names = [f"{m.task}: {m.first} - {m.second}" for m, _ in shown]
    values = [value for _, value in shown]
    figure, axes = _figure(title, height=0.9 + 0.3 * len(shown))
    bars = axes.barh(names, values, color=[color(m.first, methods) for m, _ in shown])
    axes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.axvline(0, color="#888", linewidth=0.8)
    axes.set_xlabel("margin (accuracy points)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    texts = {}
    for number, (bar, name, value) in enumerate(zip(bars, names, values, strict=True)):
        bar.set_gid(f"b{number}")
        texts[f"b{number}"] = f"{name}: {value:+.2f} points"
    return _svg(figure, title, texts)


def needle_chart(title: str, cells: Sequence[NeedleCell]) -> str:
    """Draw the accuracy of finding needles as one heat map for each label, depth over length."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(cell.label for cell in cells))
    figure = Figure(figsize=(1.2 + 2.6 * len(labels), 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10, fontweight="bold")
    for axes, label in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
        lengths, depths, accuracies = grid([cell for cell in cells if cell.label == label])
        shares = [[math.nan if share is None else share for share in row] for row in accuracies]
        image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for row, values in enumerate(accuracies):
            for column, share in enumerate(values):
                text = "" if share is None else f"{100 * share:.0f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lengths)), [f"{n / 1024:g}k" for n in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths], fontsize=8)
        axes.set_title(label, fontsize=9)
    figure.supxlabel("context length (tokens)", fontsize=8)
    figure.supylabel("depth", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="accuracy")
    return _svg(figure, title, {})


def _figure(title: str, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Figure, title: str, texts: Mapping[str, str]) -> str:
    """Write a figure as an SVG element.

    Args:
        figure: The figure.
        title: Name of the figure for screen readers, and salt of its ids. Every figure of a page
            needs its own title.
        texts: Text that an element shows on hover, by the element's id.
    """
    from matplotlib import rc_context

    stream = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(stream, format="svg", metadata=_NO_METADATA)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    image = ElementTree.fromstring(stream.getvalue())
    image.attrib.update({"role": "img", "aria-label": title})
    for element in image.iter():
        element.attrib.pop("target", None)  # links stay on the page
        if (text := texts.get(element.attrib.get("id", ""))) is not None:
            ElementTree.SubElement(element, f"{{{_SVG}}}title").text = text
            del element.attrib["id"]  # other figures of the page repeat this id
    return ElementTree.tostring(image, encoding="unicode")
