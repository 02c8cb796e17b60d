"""Which layers and heads compress, as a picture."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dms_train.inference.errors import InferenceError


def draw_heatmap(cr_factors: Tensor, path: Path, title: str) -> None:
    """Write a PNG of cr_factor [layers, kv_heads], layers downwards.

    Raises:
        InferenceError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InferenceError("a heatmap needs matplotlib; install dms-train[plot]") from None
    layers, heads = cr_factors.shape
    figure = Figure(figsize=(2.5 + 0.5 * heads, 1.8 + 0.3 * layers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(cr_factors.numpy(), aspect="auto", vmin=1.0, cmap="viridis")
    axes.set(xlabel="KV head", ylabel="layer", title=title)
    axes.set_xticks(range(heads))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    figure.colorbar(image, label="cr_factor")
    FigureCanvasAgg(figure).print_png(path)
