"""Page of measured attention, with the roofline in docs/figures.

    python -m benchmarks page attention

Reads `attention.json` and, if present, `accuracy.json`. Nothing is measured here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attention import accuracy as attention_accuracy
from benchmarks.attention import train_cases
from benchmarks.attention.shapes import Shape
from benchmarks.records import ROOT, folder_of, measured_at, stored_records, write_page
from dms_train.evaluation.errors import EvaluationError

PAGE = ROOT / "docs" / "performance" / "attention.md"
FIGURE = "figures/attention_roofline.png"
_BYTES = 2  # size of a bf16 number
_SHOWN = ("cuDNN causal", "flex DMS", "ours: triton")


class Point(NamedTuple):
    """Point of a roofline: operations per moved byte, and operations per second."""

    series: str
    intensity: float
    flops_per_s: float


def write(results: Path, page: Path) -> None:
    """Write the newest run between the markers of a page, and its figure.

    Args:
        results: Folders of devices.
        page: Page; the figure is in the folder next to it.

    Raises:
        EvaluationError: There is no run, or a peer was too slow in it.
    """
    run = next(iter(stored_records(results, "attention.json")), None)
    if run is None:
        raise EvaluationError(f"{results}: no attention.json of a GPU; run the benchmark first")
    folder = folder_of(run["device"], results)
    if run["valid"] is False:
        raise EvaluationError(f"{folder}: the run is invalid, a peer was too slow; measure again")
    accuracy = folder / "accuracy.json"
    lines = page_lines(run, json.loads(accuracy.read_text()) if accuracy.is_file() else None)
    write_page(page, "\n".join(lines))
    figure = page.parent / FIGURE
    figure.parent.mkdir(exist_ok=True)
    draw(run, figure)


def page_lines(record: dict[str, Any], accuracy: dict[str, Any] | None) -> Iterator[str]:
    """Yield the results of the page, from the two records."""
    versions, ceilings = record["versions"], record["ceilings"]
    yield (
        f"Device: {record['device']}; " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".  "
    )
    yield (
        f"Ceilings of the run: copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s read + written, "
        f"{ceilings['gemm_edge']:.0f}^3 bf16 product {ceilings['gemm_flops_per_s'] / 1e12:.0f} "
        "TFLOP/s.  "
    )
    yield f"Command: `python -m benchmarks attention`. Measured at: {measured_at(record)}.  "
    if record["recorded"]:
        worst = max(entry["slower"] for entry in record["recorded"])
        yield f"Of {len(record['recorded'])} recorded peer times the worst came out {worst:+.1%}."
    if "train" in record:
        yield "\n## Training, forward and backward"
        yield train_cases.table(record["train"], ceilings["gemm_flops_per_s"])
    for name in ("prefill", "decode"):
        if name in record:
            cases = importlib.import_module(f"benchmarks.attention.{name}_cases")
            text = cases.table(record[name])
            fenced = text if text.startswith("|") else f"```\n{text}\n```"
            yield f"\n## {name.capitalize()}\n\n{fenced}"
    yield f"\n![roofline of the run]({FIGURE})"
    if accuracy is not None:
        yield "\n## Accuracy\n\nCommand: `python -m benchmarks attention accuracy`. "
        yield f"Measured at: {measured_at(accuracy)}.\n"
        yield attention_accuracy.tables(accuracy)


def points(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of training rows by direction, and of decode rows if there are any."""
    for case in record.get("train", []):
        shape = Shape(**case["shape"])
        flops = shape.flops()
        for row in case["rows"]:
            if row["name"] not in _SHOWN or "skipped" in row:
                continue
            for direction, operations, moved in zip(
                ("forward", "backward"), flops, _moved(shape), strict=True
            ):
                series = f"{row['name']}, {direction}"
                yield Point(series, operations / moved, row[f"{direction}_flops_per_s"])
    for row in record.get("decode", []):
        # a key and a value of d numbers take 4 d operations for each query head of the group
        intensity = 2 * row["group"] / (1 if row["cache"] == "fp8" else 2)
        yield Point(f"ours: decode, {row['cache']}", intensity, row["tb_s"] * 1e12 * intensity)


def _moved(shape: Shape) -> tuple[int, int]:
    """Return the bytes of inputs and outputs: q, k, v, o; and q, k, v, o, do, dq, dk, dv."""
    queries, keys = shape.b * shape.hq * shape.s * shape.d, shape.b * shape.hk * shape.s * shape.d
    return _BYTES * (2 * queries + 2 * keys), _BYTES * (4 * queries + 4 * keys)


def draw(record: dict[str, Any], file: Path) -> None:
    """Draw the roofline of the run as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bandwidth = record["ceilings"]["copy_bytes_per_s"]
    product = record["ceilings"]["gemm_flops_per_s"]
    plotted = list(points(record))
    low = min([1.0, *(point.intensity for point in plotted)]) / 2
    high = max([1e3, *(point.intensity for point in plotted)]) * 2
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    ridge = product / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth, product, product], color="black", linewidth=1)
    axes.annotate("copy bandwidth", (low * 2, low * 2 * bandwidth), va="top")
    axes.annotate("large bf16 product", (high, product), ha="right", va="bottom")
    for number, series in enumerate(dict.fromkeys(point.series for point in plotted)):
        mine = [point for point in plotted if point.series == series]
        axes.plot(
            [point.intensity for point in mine],
            [point.flops_per_s for point in mine],
            marker="osv^D"[number % 5],
            linestyle="none",
            label=series,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations / byte", ylabel="operations / s")
    axes.set_title(f"Attention on {record['device']}")
    axes.grid(visible=True, which="both", alpha=0.2)
    if plotted:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    plt.close(figure)
