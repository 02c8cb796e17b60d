"""Pictures of the tokens that a cache keeps."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from research.retention.held import Curve, TypeCount, TypedSequence

Head = tuple[int, int]  # layer and KV head

# Colours of words that are evicted, in the window, and held after it.
_CELLS, _TEXT = ("#ffffff", "#cfe2f7", "#2f7ed8"), ("#aaaaaa", "black", "white")
_COLUMN, _ROW = 0.3, 0.16  # width and height of a word in inches
_WIDEST = 16  # largest number of words in a row


def draw_curve(curve: Curve, path: Path) -> None:
    """Draw the median and the middle 80 % of the sequences at each position."""
    from matplotlib.figure import Figure

    positions = sorted(p for p, values in curve.items() if len(values) >= 10)
    deciles = [statistics.quantiles(curve[p], n=10) for p in positions]
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(positions, [d[0] for d in deciles], [d[-1] for d in deciles], alpha=0.25)
    axes.plot(positions, [d[4] for d in deciles])
    axes.set(xlabel="tokens seen", ylabel="cr_factor", ylim=(1, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def draw_types(counts: dict[str, TypeCount], path: Path) -> None:
    """Draw the held share of each type that occurs, with a row for each KV head."""
    from matplotlib.figure import Figure

    counts = {name: type_count for name, type_count in counts.items() if type_count.tokens}
    shares = torch.stack([type_count.shares for type_count in counts.values()], -1)  # [l, h, k]
    layers, heads, types = shares.shape
    figure = Figure(figsize=(2.5 + 0.55 * types, 2.2 + 0.24 * layers * heads), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares.flatten(0, 1).numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(types), list(counts), rotation=45, ha="right")
    axes.set_yticks(
        range(layers * heads),
        [f"{layer}.{head}" for layer in range(layers) for head in range(heads)],
    )
    axes.set_ylabel("layer.KV head")
    for row, values in enumerate(shares.flatten(0, 1).tolist()):
        for column, share in enumerate(values):
            color = "white" if share < 0.6 else "black"
            axes.text(
                column, row, f"{100 * share:.0f}", ha="center", va="center", size=7, color=color
            )
    axes.set_title("percent held of the tokens that have left the window", size=9)
    figure.colorbar(image, label="share")
    figure.savefig(path, dpi=130)


def draw_trace(sequence: TypedSequence, heads: list[Head], path: Path) -> None:
    """Draw the words of a sequence once for each head, and mark those that it holds."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    word_cells = _word_cells(sequence)
    rows, columns = (max(values) + 1 for values in zip(*word_cells, strict=True))
    size = (len(heads) * columns * _COLUMN + 0.4, rows * _ROW + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle("dark: held, light: in the window, no colour: evicted", size=8)
    for number, (layer, head) in enumerate(heads, 1):
        axes = figure.add_subplot(1, len(heads), number)
        axes.set_title(f"layer {layer}, KV head {head}", size=8)
        axes.set(xticks=[], yticks=[])
        state = sequence.held[layer, head].int() * (1 + sequence.left.int())
        cells = torch.zeros(rows, columns, dtype=torch.int32)
        for cell, word, kind in zip(word_cells, sequence.words, state.tolist(), strict=True):
            cells[cell] = kind
            row, column = cell
            axes.text(column, row, word.word, color=_TEXT[kind], size=6, ha="center", va="center")
        axes.imshow(cells.numpy(), aspect="auto", cmap=ListedColormap(_CELLS), vmin=0, vmax=2)
    figure.savefig(path, dpi=110)


def _word_cells(sequence: TypedSequence) -> list[tuple[int, int]]:
    """Return row and column of every word."""
    cells: list[tuple[int, int]] = []
    row, column = 0, -1
    for word in sequence.words:
        column += 1
        if cells and (word.begins or column == _WIDEST):
            row, column = row + 1, 0
        cells.append((row, column))
    return cells
