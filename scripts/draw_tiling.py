"""Draws docs/figures/attention_tiling.svg: which tiles of the score matrix need which work.

    python scripts/draw_tiling.py

TrainTiles are classed by the rule that the kernels use, from block bounds and the window alone.
"""

from __future__ import annotations

from pathlib import Path

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "attention_tiling.svg"
TILES, EDGE, WINDOW = 10, 8, 19  # tiles a side, positions of a tile, window in positions
SKIPPED_COLUMN = 1  # a tile of keys that are all evicted
# Weight that each key keeps outside the window, exp(log_keep); drawn as the bars below the matrix.
KEPT = [0.95, 0.1, 0.6, 1.0, 0.3, 0.8, 0.05, 0.9]
COLOURS = {
    "old": "#7aa6d8",
    "edge": "#f2b65a",
    "inside": "#8fc98f",
    "diagonal": "#5fa35f",
    "skipped": "#e4e4e4",
}
LEGEND = {
    "old": "outside the window: one bias for each column, no test",
    "edge": "window edge: i - j > window decides for each element",
    "inside": "inside the window: no bias",
    "diagonal": "diagonal: no bias, causal mask",
    "skipped": "outside the window, every key evicted: not loaded",
}
_SIZE, _LEFT, _TOP = 36, 70, 50  # pixels of a tile, and where the matrix starts


def tile_class(row: int, column: int, edge: int, window: int) -> str | None:
    """Class of the tile of queries `row` and keys `column`; None where all is in the future."""
    first, last = row * edge, row * edge + edge - 1  # queries
    oldest, newest = column * edge, column * edge + edge - 1  # keys
    if oldest > last:
        return None
    if first - newest > window:
        return "old"
    if last - oldest > window:
        return "edge"
    return "inside" if newest <= first else "diagonal"


def draw() -> str:
    """The figure as SVG."""
    side = TILES * _SIZE
    height = _TOP + side + 190
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" '
        f'viewBox="0 0 640 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="640" height="{height}" fill="white"/>',
        _text(_LEFT + side / 2, _TOP - 25, f"keys j, {EDGE} in a tile", "middle"),
        _text(_LEFT - 12, _TOP + side / 2, "queries i", "middle", turn=True),
    ]
    for row in range(TILES):
        parts += [_tile(row, column) for column in range(TILES)]
    parts += [*_window_line(), *_bars(_TOP + side + 12), *_legend(_TOP + side + 70)]
    return "\n".join([*parts, "</svg>", ""])


def _tile(row: int, column: int) -> str:
    kind = tile_class(row, column, EDGE, WINDOW)
    if kind == "old" and column == SKIPPED_COLUMN:
        kind = "skipped"
    fill = "white" if kind is None else COLOURS[kind]
    return _box(_LEFT + column * _SIZE, _TOP + row * _SIZE, _SIZE, _SIZE, fill)


def _window_line() -> list[str]:
    """Return the line i - j = window: keys left of it are outside the window."""
    pixel = _SIZE / EDGE
    start, end = WINDOW * pixel, TILES * _SIZE
    return [
        f'<line x1="{_LEFT}" y1="{_TOP + start:g}" x2="{_LEFT + end - start:g}" '
        f'y2="{_TOP + end}" stroke="#b03030" stroke-width="2" stroke-dasharray="6 3"/>',
        _text(_LEFT + 150, _TOP + 22, "dashed: i - j = window; left of it: outside the window"),
    ]


def _bars(top: float) -> list[str]:
    pixel = _SIZE / EDGE
    parts = []
    for column in range(TILES):
        for place in range(EDGE):
            height = 0 if column == SKIPPED_COLUMN else 26 * KEPT[(place + 3 * column) % EDGE]
            left = _LEFT + column * _SIZE + place * pixel
            parts.append(_box(left, top + 26 - height, pixel, height, "#555555"))
    return [*parts, _text(_LEFT, top + 44, "1 - alpha of each key: its weight outside the window")]


def _legend(top: float) -> list[str]:
    parts = []
    for line, (kind, words) in enumerate(LEGEND.items()):
        y = top + 22 * line
        parts += [_box(_LEFT, y, 16, 16, COLOURS[kind]), _text(_LEFT + 26, y + 13, words)]
    return parts


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        'stroke="white"/>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", *, turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:g} {y:g})"' if turn else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{turned}>{words}</text>'


if __name__ == "__main__":
    FIGURE.write_text(draw())
