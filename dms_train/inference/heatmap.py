"""Heatmap of a number per layer and KV head, such as the compression ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from dms_train.inference.errors import InferenceError


def draw_heatmap(
    values: Tensor,
    path: Path | BinaryIO,
    title: str,
    label: str = "cr_factor",
    limits: tuple[float | None, float | None] = (1.0, None),
    layer_numbers: Sequence[int] | None = None,
) -> None:
    """Write a PNG of one number per KV head, layers downwards.

    Args:
        values: [layers, kv_heads].
        path: Path of the file, or a binary file that is open for writing.
        title: Title of the figure.
        label: Name of the number.
        limits: Values at the ends of the colour scale; None takes the extremes of the data.
        layer_numbers: Number of the layer in each row; None numbers the rows from 0.

    Raises:
        InferenceError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InferenceError("a heatmap needs matplotlib; pip install 'dms-train[eval]'") from None
    low, high = limits
    layers, heads = values.shape
    figure = Figure(figsize=(2.5 + 0.5 * heads, 1.8 + 0.3 * layers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", vmin=low, vmax=high)
    axes.set(xlabel="KV head", ylabel="layer", title=title)
    axes.set_xticks(range(heads))
    shown = range(0, layers, max(1, layers // 16))
    axes.set_yticks(shown, [str((layer_numbers or range(layers))[row]) for row in shown])
    figure.colorbar(image, label=label)
    FigureCanvasAgg(figure).print_png(path)
